"""The shape of a model as Hugging Face's `config.json`, and back. What our decoder cannot be is refused by its name there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from thinwire.config.sections import ModelConfig

CONFIG_JSON = "config.json"
CONTENTS = "thinwire.json"
"""Where an exported folder came from, and the sha256 of every other file in it."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NEEDED = {"hidden_act": "silu", "is_causal": True, "partial_rotary_factor": 1, "quantization_config": None}
"""What our decoder is, in the words of `config.json`; a word that is absent or null there means the same."""
LIMITS = "it can hold plain Llama models alone: choose another folder, or convert this one"


def to_json(model: ModelConfig, dtype: torch.dtype, tokens: dict[str, Any], positions: int) -> dict[str, Any]:
    """Describe the plain network; `tokens` are ids by their names there, `positions` is the longest sequence."""
    number_format = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": model.norm_eps,
        # One for transformers 5, the other for transformers 4: each passes over what it does not know.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "attention_bias": model.output_bias,
        "attention_dropout": 0.0,
        "mlp_bias": model.output_bias,
        "tie_word_embeddings": model.tied_head,
        "use_cache": True,
        **{name: tokens.get(name) for name in TOKENS},
        "dtype": number_format,
        "torch_dtype": number_format,
    }


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say what is wrong with the file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); a Hugging Face folder has one: download it again") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} holds {type(table).__name__}, not an object; download it again")
    return table


def from_json(table: dict[str, Any], where: Path) -> ModelConfig:
    """Return the settings of the same network."""
    refuse_others(table, where)
    heads = whole_number(table, "num_attention_heads", where)
    width = whole_number(table, "hidden_size", where)
    head_size = whole_number(table, "head_dim", where, width // max(1, heads))
    if head_size * heads != width:
        raise ValueError(
            f"{where}: head_dim is {head_size}, but hidden_size / num_attention_heads is {width} / {heads}; our attention is as wide as "
            "the model: choose a model whose heads divide its width"
        )
    return ModelConfig(
        vocabulary=whole_number(table, "vocab_size", where),
        width=width,
        layers=whole_number(table, "num_hidden_layers", where),
        heads=heads,
        kv_heads=whole_number(table, "num_key_value_heads", where, heads),
        ffn=whole_number(table, "intermediate_size", where),
        context=whole_number(table, "max_position_embeddings", where, 2048),
        rope_theta=rotary_base(table, where),
        norm_eps=real(table, "rms_norm_eps", where, 1e-6),
        output_bias=bool(table.get("attention_bias") or table.get("mlp_bias")),
        tied_head=bool(table.get("tie_word_embeddings")),
    )


def refuse_others(table: dict[str, Any], where: Path) -> None:
    """Refuse what is no plain Llama."""
    architectures = table.get("architectures") or ["LlamaForCausalLM"]
    if table.get("model_type") != "llama" or architectures != ["LlamaForCausalLM"]:
        raise ValueError(
            f"{where}: the architecture is {table.get('model_type')!r} {architectures}; a run imports 'llama' ['LlamaForCausalLM'] alone"
        )
    for name, allowed in NEEDED.items():
        if table.get(name, allowed) not in (allowed, None):
            raise ValueError(f"{where}: {name} is {table[name]!r}, our decoder has {allowed!r}; {LIMITS}")


def untaken(table: dict[str, Any]) -> list[str]:
    """Say which settings of the folder concern training alone and are not taken over."""
    rate = table.get("attention_dropout")
    if not rate:
        return []
    return [
        f"note: attention_dropout {rate} of {CONFIG_JSON} is not taken over: our attention drops none of its weights, so the run trains "
        "without it. The network is the same; to train with dropout inside each branch instead, add --model.dropout RATE"
    ]


def rotary_base(table: dict[str, Any], where: Path) -> float:
    """Return the base of the rotary frequencies; scaled ones are refused."""
    base = table.get("rope_theta", 10_000.0)
    for name in ("rope_parameters", "rope_scaling"):
        part = table.get(name) or {}
        if not isinstance(part, dict):
            raise ValueError(f"{where}: {name} is {part!r}; it must be an object such as {{'rope_type': 'default'}}")
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default" or part.get("partial_rotary_factor", 1) != 1:
            raise ValueError(
                f"{where}: {name} is {part!r}; our rotary positions are of the kind 'default': choose a model without rope scaling, such "
                "as the one this was extended from"
            )
        base = part.get("rope_theta", base)
    return real({"rope_theta": base}, "rope_theta", where)


def whole_number(table: dict[str, Any], name: str, where: Path, default: int | None = None) -> int:
    """Return a whole number of at least 1."""
    value: Any = default if table.get(name) is None else table[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}; it must be a whole number of at least 1: mend the file or download it again")
    return value


def real(table: dict[str, Any], name: str, where: Path, default: float | None = None) -> float:
    """Return a number above 0."""
    value: Any = default if table.get(name) is None else table[name]
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{where}: {name} is {value!r}; it must be a number above 0: mend the file or download it again")
    return float(value)
