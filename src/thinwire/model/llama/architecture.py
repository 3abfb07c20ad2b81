"""Llama and its relatives: RMSNorm, rotary grouped-query attention and a gated FFN, with the ingredients that `[model]` names.

`llama` takes every ingredient; a relative, such as `qwen3`, takes those that its Hugging Face form has, so that every run of it is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from thinwire.config.sections import ModelConfig
from thinwire.model.architecture import Architecture, Units
from thinwire.model.llama.family import LLAMA, Family
from thinwire.model.llama.huggingface import DecoderForm
from thinwire.model.llama.rope import check_rotary
from thinwire.model.llama.shapes import biased, block_shapes, matrix_shapes
from thinwire.model.llama.window import seen_tokens, sliding_layers
from thinwire.util.sizes import near_divisors

if TYPE_CHECKING:
    from torch import Tensor, nn


class Decoder(Architecture):
    """Declare a Llama-style decoder; the block is in `block.py`, imported when one is made."""

    def __init__(self, family: Family = LLAMA) -> None:
        self.family = family
        self.huggingface = DecoderForm(family)

    def check(self, model: ModelConfig) -> None:
        if model.head_dim is None and model.width % model.heads:
            choice = near_divisors(model.width, model.heads)
            raise ValueError(
                f"model.heads is {model.heads}, which does not divide model.width {model.width}; choose {choice}, or set --model.head_dim"
            )
        check_rotary(model)
        if model.separator is not None and model.rope_kind == "dynamic":
            raise ValueError(
                "model.separator lets positions begin anew, and model.rope_kind dynamic turns by the length of a whole sequence; leave one "
                "of them out"
            )
        if model.heads % model.kv_heads:
            choice = near_divisors(model.heads, model.kv_heads)
            raise ValueError(f"model.kv_heads is {model.kv_heads}, which does not divide model.heads {model.heads}; choose {choice}")
        if model.norm_reorder and model.branch_norm_gains:
            raise ValueError("model.norm_reorder and model.branch_norm_gains are two norms behind a branch; leave one of them out")
        sliding_layers(model)
        reason = None if self.family is LLAMA else DecoderForm(self.family).why_not(model)
        if reason:
            raise ValueError(f"{reason}; change that, or choose --model.architecture llama, which takes every ingredient")

    def block(self, model: ModelConfig, layer: int, width: int, last_width: int) -> nn.Module:
        from thinwire.model.llama.block import LlamaBlock

        return LlamaBlock(model, layer, width, last_width)

    def norm(self, model: ModelConfig) -> nn.Module:
        from thinwire.model.llama.norm import RMSNorm

        return RMSNorm(model.width, model.norm_eps)

    def tables(self, model: ModelConfig, positions: range) -> tuple[Tensor, ...]:
        from thinwire.model.llama.rotary import rotary_tables

        return rotary_tables(model, positions)

    def writers(self, model: ModelConfig) -> Mapping[str, int]:
        bias = biased(model)
        return {f"{matrix}.{kind}": 0 for matrix in ("attention.output", "ffn.down") for kind in ("weight", "bias")[: 1 + bias[matrix]]}

    def leaving(self, model: ModelConfig) -> list[str]:
        return [name for name in ("output_dropout", "branch_norm_gains") if getattr(model, name)]

    def units(self, model: ModelConfig) -> Sequence[Units]:
        """List key/value heads, each with its query heads, and neurons of the FFN."""
        there, axes = block_shapes(model), {"attention.output.weight": 1, "ffn.down.weight": 1}
        names = [f"{name}.{kind}" for name in matrix_shapes(model) for kind in ("weight", "bias")]
        parts = {name: axes.get(name, 0) for name in names if name in there and name not in ("attention.output.bias", "ffn.down.bias")}
        return (
            Units("key/value heads", model.kv_heads, {name: axis for name, axis in parts.items() if name.startswith("attention.")}),
            Units("neurons", model.ffn, {name: axis for name, axis in parts.items() if name.startswith("ffn.")}),
        )

    def linear_layers(self, model: ModelConfig) -> Sequence[str]:
        return tuple(matrix_shapes(model))

    def count(self, model: ModelConfig, layers: int) -> int:
        outside = (1 if model.tied_head else 2) * model.vocabulary * model.width + model.width
        return layers * sum(map(prod, block_shapes(model).values())) + outside

    def cost(self, model: ModelConfig, context: int) -> int:
        """Count as `Architecture.cost` says; where layers have different windows, as the mean over them."""
        share = len(sliding_layers(model)) / model.layers
        seen = share * seen_tokens(context, model.window) + (1 - share) * seen_tokens(context, None)
        # A token looks at each of them once with its queries and once for their values.
        return sum(map(prod, matrix_shapes(model).values())) + round(2 * seen * model.heads * model.head_size)
