"""Llama: RMSNorm, rotary grouped-query attention and SwiGLU, pre-norm, without biases unless `model.output_bias` asks for some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from thinwire.config.sections import ModelConfig
from thinwire.model.architecture import Architecture, Units
from thinwire.model.llama.huggingface import LlamaForm
from thinwire.util.sizes import near_divisors

if TYPE_CHECKING:
    from torch import Tensor, nn


class Llama(Architecture):
    """Declare the Llama-style decoder; the block is in `block.py`, imported when one is made."""

    huggingface = LlamaForm()

    def check(self, model: ModelConfig) -> None:
        if model.width % model.heads:
            choice = near_divisors(model.width, model.heads)
            raise ValueError(f"model.heads is {model.heads}, which does not divide model.width {model.width}; choose {choice}")
        if model.head_size % 2:
            raise ValueError(
                f"the head size model.width / model.heads = {model.width} / {model.heads} = {model.head_size} is odd; rotary positions "
                "turn pairs: choose widths and heads that give an even one"
            )
        if model.heads % model.kv_heads:
            choice = near_divisors(model.heads, model.kv_heads)
            raise ValueError(f"model.kv_heads is {model.kv_heads}, which does not divide model.heads {model.heads}; choose {choice}")

    def block(self, model: ModelConfig, layer: int, width: int, last_width: int) -> nn.Module:
        from thinwire.model.llama.block import LlamaBlock

        return LlamaBlock(model, layer, width, last_width)

    def norm(self, model: ModelConfig) -> nn.Module:
        from thinwire.model.llama.block import RMSNorm

        return RMSNorm(model.width, model.norm_eps)

    def tables(self, model: ModelConfig, positions: range) -> tuple[Tensor, ...]:
        from thinwire.model.llama.block import rotary_tables

        return rotary_tables(model, positions)

    def writers(self, model: ModelConfig) -> Mapping[str, int]:
        kinds = ("weight", "bias") if model.output_bias else ("weight",)
        return {f"{matrix}.{kind}": 0 for matrix in ("attention.output", "ffn.down") for kind in kinds}

    def leaving(self, model: ModelConfig) -> list[str]:
        return [name for name in ("output_bias", "output_dropout", "branch_norm_gains") if getattr(model, name)]

    def units(self, model: ModelConfig) -> Sequence[Units]:
        """List key/value heads, each with its query heads, and neurons of the FFN."""
        attention = {"query": 0, "key": 0, "value": 0, "output": 1}
        neurons = {"gate": 0, "up": 0, "down": 1}
        return (
            Units("key/value heads", model.kv_heads, {f"attention.{name}.weight": axis for name, axis in attention.items()}),
            Units("neurons", model.ffn, {f"ffn.{name}.weight": axis for name, axis in neurons.items()}),
        )

    def count(self, model: ModelConfig, layers: int) -> int:
        width, vectors = model.width, 2 + 2 * model.output_bias + 2 * model.branch_norm_gains
        outside = (1 if model.tied_head else 2) * model.vocabulary * width + width
        return layers * (self._matrices(model) + vectors * width) + outside

    def cost(self, model: ModelConfig, context: int) -> int:
        seen = (context + 1) / 2  # a token looks at itself and at those before it, once with its queries and once for their values
        return self._matrices(model) + round(2 * seen * model.heads * model.head_size)

    def _matrices(self, model: ModelConfig) -> int:
        return 2 * model.width * (model.heads + model.kv_heads) * model.head_size + 3 * model.width * model.ffn
