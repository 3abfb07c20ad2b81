"""Packaged configs of sizes people know: their parameters are those of the published models, counted without memory for them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from runs import train
from thinwire.config.sections import ModelConfig
from thinwire.config.toml import load_config
from thinwire.model.architecture import find_architecture
from thinwire.model.cut import cut_layers

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "smollm2_135m": (
        134_515_008,
        {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
        },
    ),
    "llama_1b": (
        1_235_814_400,
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA3 | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
    ),
    "llama_8b": (
        8_030_261_248,
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA3 | {"factor": 8.0},
        },
    ),
    "qwen3_0.6b": (
        596_049_920,
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
}
"""Parameters, embedding and head counted once where they are tied, and the published `config.json`."""
SPEEDRUN = 203_828_352
"""Parameters of the baseline of ProtocolNanoGPT."""


def built(model: ModelConfig) -> int:
    """Build all parts of a model on tensors without memory; return the number of their parameters."""
    architecture = find_architecture(model.architecture)
    with torch.device("meta"):
        parts = [architecture.block(model, layer, model.width, model.width) for layer in range(model.layers)]
        parts += [architecture.norm(model), nn.Embedding(model.vocabulary, model.width)]
        parts += [] if model.tied_head else [nn.Linear(model.width, model.vocabulary, bias=False)]
    found = [parameter for part in parts for parameter in part.parameters()]
    assert all(parameter.is_meta for parameter in found)
    return sum(parameter.numel() for parameter in found)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_model(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    count, published = PUBLISHED[name]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**published))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count
    model = replace(load_config(name).model, tied_head=published.get("tie_word_embeddings", False))
    assert built(model) == find_architecture(model.architecture).count(model, model.layers) == count
    form = find_architecture(model.architecture).huggingface
    assert form is not None and {entry.theirs: entry.shape for entry in form.tensors(model)} == {
        key: tuple(value.shape) for key, value in theirs.named_parameters()
    }
    described = AutoConfig.for_model(published["model_type"], **form.to_json(model, published["max_position_embeddings"]))
    assert {key: getattr(described, key) for key in published} == published


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_a_head_of_its_own_and_is_cut_evenly(name):
    config = load_config(name)
    model = config.model
    apart = model.vocabulary * model.width if "tie_word_embeddings" in PUBLISHED[name][1] else 0
    assert not model.tied_head and built(model) == PUBLISHED[name][0] + apart
    sizes = [len(part) for part in cut_layers(model.layers, config.pipeline.stages)]
    assert max(sizes) - min(sizes) <= 1


def test_the_speedrun_has_all_but_two_small_parts_of_its_baseline():
    model = load_config("speedrun_203m").model
    head_bias, norm_of_the_embedding = model.vocabulary, model.width
    assert built(model) == SPEEDRUN - head_bias - norm_of_the_embedding
    assert find_architecture("llama").count(model, model.layers) == built(model)
    matrices = 8 * (4 * prod((1024, 1024)) + 2 * prod((1024, 4096))) + 2 * prod((50304, 1024))
    assert built(model) - matrices == 8 * (4 * 1024 + 4096 + 1024 + 2 * 1024) + 1024  # biases, gains


@pytest.mark.full
def test_smollm2_trains_a_step(config, tmp_path):
    text = str(tmp_path / "text.txt")
    words = ("--data.source", text, "--model.context", "32", "--train.steps", "1", "--train.batch", "2", "--pipeline.microbatches", "2")
    words += ("--data.cache", str(tmp_path / "cache"), "--train.validation_sequences", "2", "--pipeline.stages", "2")
    summary = train("smollm2_135m", tmp_path / "run", *words, "--train.checkpoint_every", "0")
    assert summary["trainable_parameters"] == PUBLISHED["smollm2_135m"][0] + 49152 * 576
    assert 9 < summary["final_loss"] < 13  # ln 49152 is 10.8
