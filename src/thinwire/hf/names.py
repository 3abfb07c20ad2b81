"""Our names of a model's tensors beside those of Hugging Face's Llama, and the shapes of the plain network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.config.sections import ModelConfig

EMBEDDING, HEAD = "embedding.weight", "head.weight"
OF_A_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
WITH_BIAS = ("attention.output", "ffn.down")
"""Matrices that have a bias with `model.output_bias`."""


@dataclass(frozen=True)
class PlainTensor:
    """One tensor of the plain network."""

    theirs: str
    ours: str | None
    """None: a bias that is always zero, because our matrix has none."""
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def writes(self) -> bool:
        """Tell whether this is the embedding or a matrix that writes into the residual stream."""
        return self.ours == EMBEDDING or (self.ours or "").endswith(("attention.output.weight", "ffn.down.weight"))


def layout(model: ModelConfig) -> list[PlainTensor]:
    """List the tensors of the plain network in the order of the layers."""
    entries = [PlainTensor("model.embed_tokens.weight", EMBEDDING, (model.vocabulary, model.width))]
    for layer in range(model.layers):
        entries += of_layer(model, layer)
    entries.append(PlainTensor("model.norm.weight", "norm.weight", (model.width,)))
    if not model.tied_head:
        entries.append(PlainTensor("lm_head.weight", HEAD, (model.vocabulary, model.width)))
    return entries


def of_layer(model: ModelConfig, layer: int) -> Iterator[PlainTensor]:
    """List the tensors of one layer."""
    width, keys = model.width, model.kv_heads * model.head_size
    outputs = {"attention.key": keys, "attention.value": keys, "ffn.gate": model.ffn, "ffn.up": model.ffn}
    for ours, theirs in OF_A_LAYER.items():
        theirs, named = f"model.layers.{layer}.{theirs}", f"layers.{layer}.{ours}"
        if ours.endswith("norm"):
            yield PlainTensor(f"{theirs}.weight", f"{named}.weight", (width,), layer)
            continue
        rows = outputs.get(ours, width)
        yield PlainTensor(f"{theirs}.weight", f"{named}.weight", (rows, model.ffn if ours == "ffn.down" else width), layer)
        if model.output_bias:
            yield PlainTensor(f"{theirs}.bias", f"{named}.bias" if ours in WITH_BIAS else None, (rows,), layer)
