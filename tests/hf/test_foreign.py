"""Broken folders are refused by the file and the problem, before anything is made."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf.support import bring_in, export, our_logits, some_ids, train_run
from thinwire.cli import main as cli

NORM, INDEX = "model.norm.weight", "model.safetensors.index.json"


def change_json(name: str, **changes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        table = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(table | changes))

    return change


def change_tensors(**changes) -> Callable[[Path], None]:
    """Put other tensors into the shard of the last norm, and into the index unless they are stray; None takes one out."""
    named = {name.replace("/", "."): tensor for name, tensor in changes.items()}

    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        shard = index["weight_map"][NORM]
        tensors = load_file(folder / shard) | named
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / shard)
        index["weight_map"] |= {name: shard for name in tensors if name != "stray"}
        (folder / INDEX).write_text(json.dumps(index))

    return change


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def truncate(folder: Path) -> None:
    path = sorted(folder.glob("model-*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-10])


def with_value(value: float) -> torch.Tensor:
    """Return weights of the last norm, one of them with this value."""
    return torch.ones(32).index_fill(0, torch.tensor([3]), value)


def as_pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def pickle_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))


class Trap:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def one_bias(folder: Path) -> None:
    """Give a query bias that is not zero, as some Llamas have it, and the others of attention as zeros."""
    change_json("config.json", attention_bias=True)(folder)
    biases = {}
    for layer in range(4):
        for name, width in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
            biases[f"model/layers/{layer}/self_attn/{name}_proj/bias"] = torch.full((width,), float(layer == 2 and name == "q"))
    change_tensors(**biases)(folder)


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove("config.json"), r"config.json cannot be read \(No such file"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{") and None, "config.json is not JSON"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]") and None, "config.json holds list, not an object"),
    "architecture": (change_json("config.json", model_type="mistral"), "architecture is 'mistral'"),
    "architectures": (change_json("config.json", architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    "activation": (change_json("config.json", hidden_act="gelu"), "hidden_act is 'gelu', our decoder has 'silu'"),
    "quantised": (change_json("config.json", quantization_config={"bits": 4}), "quantization_config is {'bits': 4}"),
    "head size": (change_json("config.json", head_dim=16), "head_dim is 16, but hidden_size / num_attention_heads is 32 / 4"),
    "scaled positions": (change_json("config.json", rope_scaling={"type": "linear", "factor": 2}), "rope_scaling is .*'linear'"),
    "new positions": (change_json("config.json", rope_parameters={"rope_type": "yarn"}), "rope_parameters is .*'yarn'"),
    "text for a number": (change_json("config.json", hidden_size="32"), "hidden_size is '32'; it must be a whole number"),
    "no number": (change_json("config.json", vocab_size=None), "vocab_size is None"),
    "endless layers": (change_json("config.json", num_hidden_layers=10**12), "too few for num_hidden_layers 1000000000000"),
    "more layers": (change_json("config.json", num_hidden_layers=5), "lacks the tensor model.layers.4.input_layernorm.weight"),
    "missing shard": (remove("model-00002-of-00007.safetensors"), "the shard .*model-00002-of-00007.safetensors is missing"),
    "truncated": (truncate, "model-00002-of-00007.safetensors is not a whole safetensors file"),
    "no weights": (lambda folder: remove(*(path.name for path in folder.glob("model*")))(folder), "has neither model.safetensors nor"),
    "pickle": (pickle_weights, "pytorch_model.bin holds pickled weights.*it was not opened.*save_pretrained"),
    "index without a map": (change_json(INDEX, weight_map={}), "has no weight_map"),
    "index names another folder": (change_json(INDEX, weight_map={NORM: "../x.safetensors"}), "names the file '../x.safetensors'"),
    "index names an absent tensor": (change_tensors(**{"model/norm/weight": None}), "places model.norm.weight in .*does not hold it"),
    "stray tensor": (change_tensors(stray=torch.ones(2)), "holds stray, which model.safetensors.index.json places in None"),
    "unknown tensor": (change_tensors(unknown=torch.ones(2)), "holds unknown, which a Llama with this config.json does not have"),
    "shape": (change_tensors(**{"model/norm/weight": torch.ones(31)}), r"model.norm.weight has the shape \(31,\), .* calls for \(32,\)"),
    "integers": (change_tensors(**{"model/norm/weight": torch.ones(32, dtype=torch.int8)}), "model.norm.weight is I8; weights must be F32"),
    "bias": (one_bias, "model.layers.2.self_attn.q_proj.bias is not zero"),
    "tied but with another head": (
        change_json("config.json", tie_word_embeddings=True),
        'lm_head.weight is another matrix than model.embed_tokens.weight.*write "tie_word_embeddings": false into config.json',
    ),
    "looks ahead": (change_json("config.json", is_causal=False), "is_causal is False, our decoder has True"),
    "not a number": (
        change_tensors(**{"model/norm/weight": with_value(float("nan"))}),
        r"model.norm.weight\[3\] is NaN or infinite, 1 such",
    ),
    "infinite": (change_tensors(**{"model/norm/weight": with_value(-float("inf"))}), r"model.norm.weight\[3\] is NaN or infinite"),
    "infinite in half": (change_tensors(**{"model/norm/weight": with_value(1e5).half()}), r"model.norm.weight\[3\] is NaN or infinite"),
    "a pipe for a file": (as_pipe("config.json"), "config.json is not a regular file"),
}


@pytest.mark.parametrize("change, message", CASES.values(), ids=CASES)
def test_a_broken_folder_is_refused_by_name(settings_file, folder, tmp_path, capsys, change, message):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "thinwire.json").unlink()
    change(broken)
    assert cli.main(["import", str(broken), "--run", str(tmp_path / "run"), "--config", settings_file]) == 2
    error = capsys.readouterr().err
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)
    assert str(broken) in error and ";" in error
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize("name", ["model-00001-of-00007.safetensors", "tokenizer.json", "config.json"])
def test_a_file_that_changed_is_found_by_its_sha256(settings_file, folder, tmp_path, capsys, name):
    broken = shutil.copytree(folder, tmp_path / "broken")
    data = bytearray((broken / name).read_bytes())
    data[-1] ^= 1 if name.endswith("safetensors") else ord("\n") ^ ord(" ")
    (broken / name).write_bytes(data)
    (broken / "README.md").write_text("my own card")  # this is for people to change
    assert cli.main(["import", str(broken), "--run", str(tmp_path / "run"), "--config", settings_file]) == 2
    assert f"{name} does not match its sha256 in thinwire.json" in capsys.readouterr().err


def test_a_missing_file_and_no_folder(settings_file, folder, tmp_path, capsys):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "special_tokens_map.json").unlink()
    assert cli.main(["import", str(broken), "--run", str(tmp_path / "run")]) == 2
    assert "special_tokens_map.json is missing, thinwire.json lists it" in capsys.readouterr().err
    assert cli.main(["import", str(tmp_path / "none"), "--run", str(tmp_path / "run")]) == 2
    assert "none is not a folder" in capsys.readouterr().err
    assert cli.main(["import", "--run", "x", str(folder)]) == 2
    assert "the first thing after `thinwire import` is the folder" in capsys.readouterr().err


def test_attention_dropout_that_is_not_taken_over_is_told(settings_file, folder, tmp_path, capsys):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "thinwire.json").unlink()
    change_json("config.json", attention_dropout=0.25)(other)
    assert cli.main(["import", str(other), "--run", str(tmp_path / "run"), "--config", settings_file]) == 0
    assert "attention_dropout 0.25 of config.json is not taken over" in capsys.readouterr().out
    assert cli.main(["import", str(folder), "--run", str(tmp_path / "plain"), "--config", settings_file]) == 0
    assert "is not taken over" not in capsys.readouterr().out


def test_a_head_that_repeats_the_tied_embedding_is_accepted(config, tmp_path):
    run = train_run(config, tmp_path / "run", "--codec.name", "dense", "--model.tied_head")
    plain = export(run, tmp_path / "plain")
    (plain / "thinwire.json").unlink()
    repeated = shutil.copytree(plain, tmp_path / "repeated")
    tensors = load_file(plain / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, repeated / "model.safetensors")
    assert torch.equal(our_logits(bring_in(config, repeated, tmp_path / "again"), some_ids()), our_logits(run, some_ids()))
