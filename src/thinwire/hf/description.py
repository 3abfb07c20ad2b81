"""`config.json` of a Hugging Face folder, and back: which architecture it is, tokens and number format. The shape is the architecture's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thinwire.config.registry import ARCHITECTURES
from thinwire.config.sections import ModelConfig
from thinwire.model.architecture import find_architecture
from thinwire.model.huggingface import HuggingFace

CONFIG_JSON = "config.json"
CONTENTS = "thinwire.json"
"""Where an exported folder came from, and the sha256 of every other file in it."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
"""Words of `config.json` that tell of a mixture of experts."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def form_of(model: ModelConfig) -> HuggingFace:
    """Return the Hugging Face form of a model's architecture, which is known to have one."""
    form = find_architecture(model.architecture).huggingface
    assert form is not None, model.architecture
    return form


def title_of(model: ModelConfig) -> str:
    """Name a model's architecture for people."""
    form = find_architecture(model.architecture).huggingface
    return model.architecture if form is None else form.title


def to_json(model: ModelConfig, dtype: torch.dtype, tokens: dict[str, Any], positions: int) -> dict[str, Any]:
    """Describe the plain network; `tokens` are ids by their names there, `positions` is the longest sequence."""
    number_format, form = str(dtype).removeprefix("torch."), form_of(model)
    return {
        "architectures": [form.class_name],
        "model_type": form.model_type,
        **form.to_json(model, positions),
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
    """Return the settings of the same network, of whichever architecture has this form."""
    if quantised := table.get("quantization_config"):
        raise ValueError(
            f"{where}: quantization_config is {quantised!r}, and a run trains weights that are not quantised; import the model that this "
            "was made from, or load it in transformers, call dequantize() and write it with save_pretrained"
        )
    known = {name: form for name in ARCHITECTURES.names() if (form := find_architecture(name).huggingface) is not None}
    kind, classes = table.get("model_type"), table.get("architectures")
    for name, form in known.items():
        if kind == form.model_type and (classes or [form.class_name]) == [form.class_name]:
            return replace(form.from_json(table, where), architecture=name)
    forms = ", ".join(f"{form.model_type!r} {[form.class_name]}" for form in known.values())
    raise ValueError(f"{where}: the architecture is {kind!r} {classes or 'unnamed'}{why_none(table)}; a run imports {forms} alone")


def why_none(table: dict[str, Any]) -> str:
    """Say what keeps a network from being imported, where its description tells, and what to try."""
    if any(table.get(word) for word in EXPERTS):
        return ", a mixture of experts, and our blocks are dense: choose a dense model of the family"
    if "text_config" in table or "vision_config" in table:
        return ", which reads more than text: write its language model alone with save_pretrained, if that is one of the following"
    heads = [name for name in table.get("architectures") or [] if isinstance(name, str) and not name.endswith("ForCausalLM")]
    return f", and {heads[0]} has no head for the next token: choose the model that it was made from" if heads else ""
