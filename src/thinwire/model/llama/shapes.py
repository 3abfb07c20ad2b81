"""The parameters of a block by name, with their shapes: what is counted, exported and imported. Free of torch."""

from __future__ import annotations

from thinwire.config.sections import ModelConfig


def biased(model: ModelConfig) -> dict[str, bool]:
    """Tell which matrices of a block have a bias."""
    inner, whole = model.attention_bias != "none", model.attention_bias == "all"
    found = dict.fromkeys(("attention.query", "attention.key", "attention.value"), inner)
    found |= {"attention.output": whole or model.output_bias, "ffn.gate": model.ffn_bias, "ffn.up": model.ffn_bias}
    return found | {"ffn.down": model.ffn_bias or model.output_bias}


def matrix_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the matrices of a block, [out, in], on a stream that is as wide as the model."""
    width, queries, keys = model.width, model.heads * model.head_size, model.kv_heads * model.head_size
    found = {"attention.query": (queries, width), "attention.key": (keys, width), "attention.value": (keys, width)}
    found |= {"attention.output": (width, queries)}
    if model.ffn_kind == "swiglu":
        found |= {"ffn.gate": (model.ffn, width)}
    return found | {"ffn.up": (model.ffn, width), "ffn.down": (width, model.ffn)}


def gain_shapes(model: ModelConfig) -> dict[str, tuple[int]]:
    """Return the gains of a block's norms."""
    found: dict[str, tuple[int]] = {}
    if not model.norm_reorder:
        found |= {"attention_norm": (model.width,), "ffn_norm": (model.width,)}
    if model.branch_norm_gains:
        found |= {"attention_output_norm": (model.width,), "ffn_output_norm": (model.width,)}
    if model.qk_norm == "gains":
        found |= {"attention.query_norm": (model.head_size,), "attention.key_norm": (model.head_size,)}
    return found


def block_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every parameter of a block by its name inside it."""
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in gain_shapes(model).items()}
    for name, shape in matrix_shapes(model).items():
        found[f"{name}.weight"] = shape
        if biased(model)[name]:
            found[f"{name}.bias"] = shape[:1]
    return found
