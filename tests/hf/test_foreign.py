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
DENSE = ("--codec.name", "dense", "--model.architecture")
FAMILIES = {
    "Llama": (),
    "Mistral": (*DENSE, "mistral", "--model.window", "8"),
    "Qwen2": (*DENSE, "qwen2", "--model.attention_bias", "qkv", "--model.window", "8", "--model.window_layers", "2-3"),
    "Qwen3": (*DENSE, "qwen3", "--model.qk_norm", "gains", "--model.head_dim", "12"),
}
"""Words that make a run of each family, by its title."""


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, settings_file, tmp_path_factory) -> tuple[str, Path]:
    """The title of a family and a folder of it in several shards."""
    made = tmp_path_factory.mktemp(request.param)
    run = train_run(settings_file, made / "run", "--train.steps", "1", *FAMILIES[request.param])
    return request.param, export(run, made / "folder", "--shard-size", "30KB")


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
    path = second_shard(folder)
    path.write_bytes(path.read_bytes()[:-10])


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


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


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove("config.json"), r"config.json cannot be read \(No such file"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{") and None, "config.json is not JSON"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]") and None, "config.json holds list, not an object"),
    "architecture": (change_json("config.json", model_type="gpt_neox"), "architecture is 'gpt_neox'.* a run imports 'llama'"),
    "experts": (
        change_json("config.json", model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=8),
        r"architecture is 'mixtral' \['MixtralForCausalLM'\], a mixture of experts, and our blocks are dense: choose a dense model",
    ),
    "pictures": (change_json("config.json", model_type="llava", vision_config={}), "architecture is 'llava'.* reads more than text"),
    "architectures": (
        change_json("config.json", architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification has no head for the next token: choose",
    ),
    "activation": (change_json("config.json", hidden_act="gelu"), "hidden_act is 'gelu', our decoder has 'silu'"),
    "quantised": (change_json("config.json", quantization_config={"bits": 4}), "quantization_config is {'bits': 4}.*dequantize"),
    "head size": (change_json("config.json", head_dim=24), r"q_proj.weight has the shape .* calls for \(96, 32\)"),
    "positions of another kind": (
        change_json("config.json", rope_scaling={"type": "longrope", "factor": 2}),
        "rope_scaling is .*'longrope'",
    ),
    "new positions of another kind": (change_json("config.json", rope_parameters={"rope_type": "mrope"}), "rope_parameters is .*'mrope'"),
    "part of a head turned": (
        change_json("config.json", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "rope_parameters is .*0.5.* turn whole heads",
    ),
    "positions are a text": (change_json("config.json", rope_scaling="linear"), "rope_scaling is 'linear'; it must be an object"),
    "positions without a factor": (change_json("config.json", rope_scaling={"type": "linear"}), "factor is None; it must be a number"),
    "positions without bounds": (
        change_json("config.json", rope_scaling={"rope_type": "llama3", "factor": 8}),
        "low_freq_factor is None; it must be a number",
    ),
    "text for a number": (change_json("config.json", hidden_size="32"), "hidden_size is '32'; it must be a whole number"),
    "no number": (change_json("config.json", vocab_size=None), "vocab_size is None"),
    "endless layers": (
        change_json("config.json", num_hidden_layers=10**12, layer_types=None, use_sliding_window=True),
        "too few for num_hidden_layers 1000000000000",
    ),
    "more layers": (
        change_json("config.json", num_hidden_layers=5, layer_types=None),
        "lacks the tensor model.layers.4.input_layernorm.weight",
    ),
    "missing shard": (lambda folder: second_shard(folder).unlink(), "the shard .*model-00002-of-000...safetensors is missing"),
    "truncated": (truncate, "model-00002-of-000...safetensors is not a whole safetensors file"),
    "no weights": (lambda folder: remove(*(path.name for path in folder.glob("model*")))(folder), "has neither model.safetensors nor"),
    "pickle": (pickle_weights, "pytorch_model.bin holds pickled weights.*it was not opened.*save_pretrained"),
    "index without a map": (change_json(INDEX, weight_map={}), "has no weight_map"),
    "index names another folder": (change_json(INDEX, weight_map={NORM: "../x.safetensors"}), "names the file '../x.safetensors'"),
    "index names an absent tensor": (change_tensors(**{"model/norm/weight": None}), "places model.norm.weight in .*does not hold it"),
    "stray tensor": (change_tensors(stray=torch.ones(2)), "holds stray, which model.safetensors.index.json places in None"),
    "unknown tensor": (change_tensors(unknown=torch.ones(2)), "holds unknown, which a TITLE with this config.json does not have"),
    "shape": (change_tensors(**{"model/norm/weight": torch.ones(31)}), r"model.norm.weight has the shape \(31,\), .* calls for \(32,\)"),
    "integers": (change_tensors(**{"model/norm/weight": torch.ones(32, dtype=torch.int8)}), "model.norm.weight is I8; weights must be F32"),
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


OF_A_FAMILY: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "biases that are not there": (
        "Llama",
        change_json("config.json", attention_bias=True),
        "lacks the tensor model.layers.0.self_attn.q_proj.bias",
    ),
    "biases of the FFN that are not there": (
        "Llama",
        change_json("config.json", mlp_bias=True),
        "lacks the tensor model.layers.0.mlp.gate_proj.bias",
    ),
    "a window of a Llama": (
        "Llama",
        change_json("config.json", layer_types=["sliding_attention"] * 4),
        "layer_types is .*of full_attention",
    ),
    "layers of two kinds": (
        "Mistral",
        change_json("config.json", layer_types=["sliding_attention", "full_attention"] * 2),
        "layer_types is .* of sliding_attention alone",
    ),
    "an empty window": ("Mistral", change_json("config.json", sliding_window=0), "sliding_window is 0; it must be a whole number"),
    "too few kinds of layers": ("Qwen2", change_json("config.json", layer_types=["full_attention"]), "layer_types names 1 layers, num_hid"),
    "an unknown kind of layers": (
        "Qwen3",
        change_json("config.json", layer_types=["linear_attention"] * 4),
        "layer_types is .*'linear_att",
    ),
    "no bias of queries": (
        "Llama",
        change_json("config.json", model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
        "lacks the tensor model.layers.0.self_attn.q_proj.bias",
    ),
    "a Qwen3 without norms of heads": (
        "Llama",
        change_json("config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
        "lacks the tensor model.layers.0.self_attn.q_norm.weight",
    ),
    "a Qwen2 that says it is a Llama": (
        "Qwen2",
        change_json("config.json", model_type="llama", architectures=["LlamaForCausalLM"], layer_types=None),
        "holds model.layers.0.self_attn.k_proj.bias, which a Llama with this config.json does not have",
    ),
}


def refused(settings_file: str, folder: Path, tmp_path: Path, capsys, change: Callable[[Path], None], message: str) -> None:
    """Change a copy of a folder; its import is refused with a message that names it, and leaves nothing."""
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "thinwire.json").unlink()
    change(broken)
    assert cli.main(["import", str(broken), "--run", str(tmp_path / "run"), "--config", settings_file]) == 2
    error = capsys.readouterr().err
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)
    assert str(broken) in error and ";" in error
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize("change, message", CASES.values(), ids=CASES)
def test_a_broken_folder_is_refused_by_name(settings_file, family, tmp_path, capsys, change, message):
    title, folder = family
    refused(settings_file, folder, tmp_path, capsys, change, message.replace("TITLE", title))


@pytest.mark.parametrize("title, change, message", OF_A_FAMILY.values(), ids=OF_A_FAMILY)
def test_a_folder_that_is_not_of_its_family_is_refused_by_name(settings_file, family, tmp_path, capsys, title, change, message):
    if family[0] == title:
        refused(settings_file, family[1], tmp_path, capsys, change, message)


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
