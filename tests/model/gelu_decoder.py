"""A package of somebody else: a decoder with LayerNorm, sinusoidal positions, plain attention and a GELU MLP, in one file.

Its names are its own, and one of its output matrices lies the other way round ([in, out]).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.config.sections import ModelConfig
from thinwire.model.architecture import Architecture, Units, refuse_ingredients
from thinwire.model.block import Pass
from thinwire.model.huggingface import HuggingFace, PlainTensor, whole_number
from thinwire.model.noise import BRANCH


class GeluBlock(nn.Module):
    def __init__(self, model: ModelConfig, layer: int, width: int, last_width: int) -> None:
        super().__init__()
        self.layer, self.heads, self.rate = layer, model.heads, model.dropout
        self.first_norm, self.second_norm = (nn.LayerNorm(model.width, eps=model.norm_eps) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(model.width, model.width, bias=False) for _ in range(3))
        self.mixed_to_stream = nn.Parameter(torch.empty(model.width, width))
        self.hidden = nn.Linear(model.width, model.ffn)
        self.hidden_to_stream = nn.Linear(model.ffn, last_width, bias=False)

    def forward(self, stream: Tensor, read: Callable[[Tensor], Tensor], each: Pass) -> Tensor:
        (table_TD,) = each.tables
        hidden = self.first_norm(read(stream)) + table_TD[: stream.shape[1]]
        q, k, v = (matrix(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2) for matrix in (self.q, self.k, self.v))
        mask = None
        if each.cache is not None:
            k, v = each.cache.extend(self.layer, k, v)
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        mixed = mixed.transpose(1, 2).flatten(-2)
        stream = stream + each.dropout(mixed, self.rate, BRANCH, 2 * self.layer) @ self.mixed_to_stream
        activated = functional.gelu(self.hidden(self.second_norm(read(stream))))
        branch = self.hidden_to_stream(each.dropout(activated, self.rate, BRANCH, 2 * self.layer + 1))
        return stream[..., : branch.shape[-1]] + branch


class GeluForm(HuggingFace):
    title, model_type, class_name, head = "GELU decoder", "gelu_decoder", "GeluDecoderForCausalLM", "decoder.head"

    def tensors(self, model: ModelConfig) -> list[PlainTensor]:
        wide, hidden, vocabulary = model.width, model.ffn, model.vocabulary
        inner = {f"{norm}_norm.{part}": (wide,) for norm in ("first", "second") for part in ("weight", "bias")}
        inner |= {"q.weight": (wide, wide), "k.weight": (wide, wide), "v.weight": (wide, wide), "mixed_to_stream": (wide, wide)}
        inner |= {"hidden.weight": (hidden, wide), "hidden.bias": (hidden,), "hidden_to_stream.weight": (wide, hidden)}
        names = [("decoder.tokens", "embedding.weight", (vocabulary, wide))]
        names += [(f"decoder.{n}.{name}", f"layers.{n}.{name}", shape) for n in range(model.layers) for name, shape in inner.items()]
        names += [("decoder.norm.gain", "norm.weight", (wide,)), ("decoder.norm.shift", "norm.bias", (wide,))]
        names += [] if model.tied_head else [(self.head, "head.weight", (vocabulary, wide))]
        return [PlainTensor(*name) for name in names]

    def to_json(self, model: ModelConfig, positions: int) -> dict[str, Any]:
        sizes = {"tokens": model.vocabulary, "wide": model.width, "deep": model.layers, "heads": model.heads, "hidden": model.ffn}
        return sizes | {"longest": positions, "eps": model.norm_eps, "tied": model.tied_head}

    def from_json(self, table: dict[str, Any], where: Path) -> ModelConfig:
        names = {"vocabulary": "tokens", "width": "wide", "layers": "deep", "heads": "heads", "kv_heads": "heads", "ffn": "hidden"}
        sizes = {ours: whole_number(table, theirs, where) for ours, theirs in (names | {"context": "longest"}).items()}
        return ModelConfig(**sizes, norm_eps=table["eps"], tied_head=table["tied"])


class Gelu(Architecture):
    huggingface: HuggingFace | None = GeluForm()

    def check(self, model: ModelConfig) -> None:
        refuse_ingredients(model, (), "a GELU decoder")
        if model.kv_heads != model.heads or model.width % model.heads:
            raise ValueError(f"model.kv_heads is {model.kv_heads}; set it to model.heads {model.heads}, a divisor of model.width")

    def block(self, model: ModelConfig, layer: int, width: int, last_width: int) -> nn.Module:
        return GeluBlock(model, layer, width, last_width)

    def norm(self, model: ModelConfig) -> nn.Module:
        return nn.LayerNorm(model.width, eps=model.norm_eps)

    def tables(self, model: ModelConfig, positions: range) -> tuple[Tensor, ...]:
        angles = torch.outer(torch.tensor(list(positions), dtype=torch.float64), torch.arange(model.width, dtype=torch.float64) / 50)
        return (angles.sin(),)

    def writers(self, model: ModelConfig) -> Mapping[str, int]:
        return {"mixed_to_stream": 1, "hidden_to_stream.weight": 0}

    def units(self, model: ModelConfig) -> Sequence[Units]:
        return (
            Units("heads", model.heads, {"q.weight": 0, "k.weight": 0, "v.weight": 0, "mixed_to_stream": 0}),
            Units("neurons", model.ffn, {"hidden.weight": 0, "hidden.bias": 0, "hidden_to_stream.weight": 1}),
        )

    def count(self, model: ModelConfig, layers: int) -> int:
        wide, hidden = model.width, model.ffn
        outside = (1 if model.tied_head else 2) * model.vocabulary * wide + 2 * wide
        return layers * (4 * wide * wide + 2 * hidden * wide + hidden + 4 * wide) + outside

    def cost(self, model: ModelConfig, context: int) -> int:
        return 4 * model.width**2 + 2 * model.width * model.ffn + (context + 1) * model.width


class Bare(Gelu):
    """The same, which declares no units and no Hugging Face form."""

    huggingface = None

    def units(self, model: ModelConfig) -> Sequence[Units]:
        return ()
