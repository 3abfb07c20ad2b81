"""Random small models that transformers itself makes, of every family and kind of rotary positions, beside ours from the same folder."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from thinwire.codecs.base import DTYPES
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.hf.foreign import open_foreign
from thinwire.model.cut import cut_layers
from thinwire.model.ends import Context
from thinwire.model.stage import Stage, build_stages

SHAPE: dict[str, Any] = {
    "vocab_size": 310,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 4},
    "llama, grouped and wide heads, biases": {"model_type": "llama", "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "mistral, no window, wide heads": {"model_type": "mistral", "sliding_window": None, "head_dim": 20},
    "qwen2": {"model_type": "qwen2", "sliding_window": 8},
    "qwen2, window above": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3, window by layer, biases": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 5000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, all its words": {
        "rope_type": "yarn",
        "factor": 6.0,
        "original_max_position_embeddings": 100,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 0.8,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
    "yarn, attention factor": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
}


def make_config(family: str, rope: str = "default", **changes: Any) -> Any:
    """Return a configuration of transformers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**SHAPE | FAMILIES[family] | {"rope_parameters": dict(ROPES[rope])} | changes)


def make_model(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Make a random model; gains and biases are random too, so that none hides anything."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


def our_stages(folder: Path, count: int = 3, dtype: str = "fp32") -> list[Stage]:
    """Build stages of the network in a folder and fill them."""
    foreign = open_foreign(folder)
    foreign = foreign.untied() if foreign.model.tied_head and count > 1 else foreign
    codec = make_codec(codec_defaults("dense", dtype=dtype), foreign.model, seed=0, compute=DTYPES[dtype])
    stages = build_stages(foreign.model, cut_layers(foreign.model.layers, count), codec, 0)
    for stage in stages:
        foreign.fill(stage)
    return stages


@torch.no_grad()
def predict(stages: list[Stage], ids_BT: Tensor) -> Tensor:
    """Return the logits of whole sequences."""
    payload: tuple[Tensor, ...] = ()
    for stage in stages:
        payload = stage.predict(ids_BT, payload, Context(0, torch.arange(len(ids_BT)), training=False))
    return payload[0]


class Wider:
    """Stand in for the module torch: its fp32 is fp64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_fp64(model_type: str) -> Iterator[None]:
    """Let transformers compute in fp64 where it says fp32: angles, norms and softmax; models must be made inside."""
    modules = [importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")]
    modules.append(importlib.import_module("transformers.modeling_rope_utils"))
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(modules[0], "torch", Wider()), mock.patch.object(modules[1], "torch", Wider()):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def random_tokens(time: int, count: int = 2, seed: int = 5) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (count, time), generator=torch.Generator().manual_seed(seed))
