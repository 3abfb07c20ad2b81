"""What words of config.json mean, old and new, given and absent: as transformers read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf.families import in_fp64
from thinwire.config.sections import ModelConfig
from thinwire.hf.description import from_json
from thinwire.model.llama.rotary import rotary_tables
from thinwire.model.llama.window import window_of

transformers = pytest.importorskip("transformers")
WHERE = Path("config.json")
LEAST: dict[str, Any] = {"model_type": "llama", "vocab_size": 300, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 30}
LEAST |= {"num_attention_heads": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
POSITIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "theta of version 4": {"rope_theta": 300.0},
    "theta of version 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 20.0},
    "scaling of version 4": {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 64},
    "scaling beside parameters": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
        "rope_scaling": {"rope_type": "dynamic", "factor": 3.0},
        "rope_theta": 70.0,
        "max_position_embeddings": 100,
    },
    "llama3 of version 4": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "max_position_embeddings": 512},
    "llama3 without its context": {
        "rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 3},
        "max_position_embeddings": 90,
    },
    "yarn without a factor": {
        "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 40},
        "max_position_embeddings": 140,
    },
    "yarn by its outer word": {
        "rope_scaling": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 40},
        "original_max_position_embeddings": 60,
        "max_position_embeddings": 180,
    },
    "yarn with one mscale": {
        "rope_parameters": {"rope_type": "yarn", "factor": 5.0, "mscale": 0.7, "beta_fast": 10, "original_max_position_embeddings": 50},
    },
    "yarn of equal ends": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.1, "beta_slow": 1.0, "original_max_position_embeddings": 8},
    },
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.5}, "max_position_embeddings": 70},
}


@pytest.mark.parametrize("length", [50, 300])
@pytest.mark.parametrize("words", POSITIONS.values(), ids=POSITIONS)
def test_angles_are_those_that_transformers_mean(words, length):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with in_fp64("llama"):
        config = transformers.AutoConfig.for_model(**{key: dict(v) if isinstance(v, dict) else v for key, v in (LEAST | words).items()})
        theirs = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, dtype=torch.float64), torch.arange(length)[None])
    model = from_json(LEAST | words, WHERE)
    for ours, expected in zip(rotary_tables(model, range(length)), theirs, strict=True):
        assert (ours - expected[0]).abs().max() < 1e-10
    again = rotary_tables(model, range(length // 2, length))  # as a later chunk of the same sequence
    assert torch.equal(again[0], rotary_tables(model, range(length))[0][length // 2 :])


WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral"},
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 with its window off": {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 2, "use_sliding_window": False},
    "qwen2 with a window": {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True},
    "qwen3 with a window in all layers": {"model_type": "qwen3", "sliding_window": 7, "max_window_layers": 0, "use_sliding_window": True},
    "qwen3 with a window in the last layer": {"model_type": "qwen3", "max_window_layers": 29, "use_sliding_window": True},
    "qwen3 with a window in no layer": {"model_type": "qwen3", "max_window_layers": 30, "use_sliding_window": True},
    "qwen3 layer by layer": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"] * 10,
    },
}


@pytest.mark.parametrize("words", WINDOWS.values(), ids=WINDOWS)
def test_shapes_and_windows_are_those_that_transformers_mean(words):
    config, model = transformers.AutoConfig.for_model(**LEAST | words), from_json(LEAST | words, WHERE)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    expected = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert [window_of(model, layer) for layer in range(model.layers)] == expected
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (model.kv_heads, model.head_size, model.context) == (config.num_key_value_heads, head, config.max_position_embeddings)
    assert model.architecture == words["model_type"] and not model.tied_head


@pytest.mark.parametrize(
    "architecture, words, reason",
    [
        ("qwen3", {}, "model.qk_norm is none, and Qwen3 has gains"),
        ("qwen2", {}, "biases of attention are none, and Qwen2 has qkv"),
        ("mistral", {"attention_bias": "all"}, "biases of attention are all, and Mistral has none"),
        ("mistral", {"window": 4, "window_layers": "1"}, "window is 4 in some layers, and Mistral has a window in every layer"),
        ("mistral", {"ffn_kind": "relu2"}, "model.ffn_kind is relu2"),
        ("qwen3", {"qk_norm": "gains", "output_bias": True}, "model.output_bias puts biases into the FFN, and Qwen3 has none there"),
        ("qwen2", {"attention_bias": "qkv", "logit_cap": 15.0}, "model.logit_cap caps the logits, which Qwen2 does not have"),
        ("llama", {"head_dim": 7}, "the head size model.head_dim 7 is odd"),
        ("llama", {"heads": 3, "kv_heads": 3}, "model.heads is 3, which does not divide model.width 256.*or set --model.head_dim"),
        ("llama", {"window": 4, "window_layers": "1,9"}, "model.window_layers names 9, the model has layers 0 to 7"),
        ("llama", {"window": 4, "window_layers": "a-b"}, "write layers and ranges with commas, such as 0-3,6"),
        ("llama", {"rope_kind": "yarn", "rope_fast": 1.0}, "model.rope_fast is 1.0, model.rope_slow 1.0.*choose a larger"),
        ("llama", {"rope_kind": "dynamic", "head_dim": 2}, "dynamic needs heads of at least 4"),
        ("llama", {"norm_reorder": True, "branch_norm_gains": True}, "two norms behind a branch; leave one of them out"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(architecture, words, reason):
    from thinwire.model.architecture import find_architecture

    with pytest.raises(ValueError, match=reason):
        find_architecture(architecture).check(ModelConfig(architecture=architecture, **words))
