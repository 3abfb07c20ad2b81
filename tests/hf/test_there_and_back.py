"""Folders that transformers wrote, of every family, go in and come out the same: weights byte for byte, tied or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf.families import FAMILIES, make_config, make_model, random_tokens
from hf.support import bring_in, export, same_bytes
from thinwire.cli import main as cli
from thinwire.config.toml import CONFIG_FILE, read_config

transformers = pytest.importorskip("transformers")
SMALLER = {"yarn, all its words": ("mistral", "qwen2, window above"), "llama3": ("llama", "qwen3, window by layer, biases")}
CASES = [(family, rope, tied) for rope, families in SMALLER.items() for family in families for tied in (False, True)]
CASES += [pytest.param(family, "dynamic", True, marks=pytest.mark.full) for family in FAMILIES]
MEANING = ("rope_parameters", "head_dim", "sliding_window", "layer_types", "attention_bias", "mlp_bias", "max_position_embeddings")


def their_folder(path: Path, tokens: Path, family: str, rope: str, tied: bool) -> Path:
    """Make a folder as transformers write it, with a tokenizer of ours."""
    make_model(make_config(family, rope, tie_word_embeddings=tied)).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(tokens).save_pretrained(path)
    return path


def meaning(config: Any) -> dict[str, Any]:
    """Return what must stay the same of a configuration; a Qwen2 may leave the width of its heads out."""
    width = config.hidden_size // config.num_attention_heads
    return {name: getattr(config, name, width if name == "head_dim" else None) for name in MEANING}


@pytest.mark.parametrize("family, rope, tied", CASES)
def test_a_folder_comes_back_byte_for_byte(settings_file, folder, tmp_path, capsys, family, rope, tied):
    foreign = their_folder(tmp_path / "foreign", folder, family, rope, tied)
    run = bring_in(settings_file, foreign, tmp_path / "run", "--model.context", "16")
    assert ("the head has become a copy of the embedding" in capsys.readouterr().out.replace("\n", " ")) == tied
    assert not read_config(run / CONFIG_FILE).model.tied_head
    out = export(run, tmp_path / "out")
    theirs, ours = (load_file(path / "model.safetensors") for path in (foreign, out))
    assert theirs.keys() == ours.keys() and ("lm_head.weight" in ours) != tied
    assert all(torch.equal(theirs[name].view(torch.uint8), ours[name].view(torch.uint8)) for name in ours)
    before, after = (transformers.AutoConfig.from_pretrained(path) for path in (foreign, out))
    assert after.tie_word_embeddings == tied
    if rope != "yarn, all its words":  # its mscale goes out as the attention factor that it stands for
        assert meaning(before) == meaning(after)
    with torch.no_grad():
        first, second = (transformers.AutoModelForCausalLM.from_pretrained(path)(random_tokens(30)).logits for path in (foreign, out))
    assert torch.equal(first, second) or (first - second).abs().max() < 1e-6 * first.abs().max()
    again = export(bring_in(settings_file, out, tmp_path / "again", "--pipeline.stages", "1"), tmp_path / "second")
    assert read_config(tmp_path / "again" / CONFIG_FILE).model.tied_head == tied  # on one stage it stays tied
    same_bytes(out, again, "README.md", "thinwire.json")


def test_a_head_that_was_trained_apart_stays_apart(settings_file, folder, tmp_path, capsys):
    foreign = their_folder(tmp_path / "foreign", folder, "llama", "default", True)
    run = bring_in(settings_file, foreign, tmp_path / "run", "--model.context", "16")
    assert cli.main(["train", "--run", str(run), "--resume"]) == 0
    capsys.readouterr()
    out = export(run, tmp_path / "out")
    assert "they have been trained apart" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    tensors = load_file(out / "model.safetensors")
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"]) and not info["missing_keys"]


def test_who_asks_for_it_keeps_a_tied_head_or_loses_it(settings_file, folder, tmp_path, capsys):
    foreign = their_folder(tmp_path / "foreign", folder, "qwen3", "default", True)
    words = ("--model.context", "16")
    tied = bring_in(settings_file, foreign, tmp_path / "tied", *words, "--model.tied_head")
    assert read_config(tied / CONFIG_FILE).model.tied_head and "copy of the embedding" not in capsys.readouterr().out
    apart = bring_in(settings_file, foreign, tmp_path / "apart", *words, "--model.no_tied_head", "--pipeline.stages", "1")
    assert not read_config(apart / CONFIG_FILE).model.tied_head and "copy of the embedding" in capsys.readouterr().out
    projected = ("--codec.name", "subspace", "--codec.rank", "8", "--project", "--pipeline.stages", "1")
    run = bring_in(settings_file, foreign, tmp_path / "projected", *words, *projected)
    assert "lm_head.weight" in load_file(export(run, tmp_path / "out") / "model.safetensors")


def test_a_projected_bias_lies_in_the_subspace(settings_file, folder, tmp_path):
    """A model whose biases are zero but on outputs, all in 6 directions, loses nothing that those hold."""
    family = "llama, grouped and wide heads, biases"
    foreign = their_folder(tmp_path / "foreign", folder, family, "default", False)
    tensors, generator = load_file(foreign / "model.safetensors"), torch.Generator().manual_seed(1)
    basis_DK = torch.linalg.qr(torch.randn(48, 6, generator=generator, dtype=torch.float64))[0]
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj", "down_proj")):
            tensors[name] = (basis_DK @ (basis_DK.T @ tensor.double())).float()
        if "embed_tokens" in name:
            tensors[name] = (tensor.double() @ basis_DK @ basis_DK.T).float()
    save_file(tensors, foreign / "model.safetensors", {"format": "pt"})
    words = ("--codec.name", "subspace", "--codec.rank", "6", "--codec.fixed_scale", "1e-6", "--project", "--model.context", "16")
    run = bring_in(settings_file, foreign, tmp_path / "run", *words)
    found = load_file(export(run, tmp_path / "out") / "model.safetensors")
    for name in ("model.layers.0.self_attn.o_proj.bias", "model.layers.1.mlp.down_proj.bias", "model.layers.1.mlp.down_proj.weight"):
        assert (found[name] - tensors[name]).abs().max() < 1e-5 * tensors[name].abs().max(), name
