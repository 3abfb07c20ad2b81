"""Rotary grouped-query attention, over all tokens before or a sliding window. Letters as in `block.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.config.sections import ModelConfig
from thinwire.model.block import Pass
from thinwire.model.llama.norm import norm_of_heads
from thinwire.model.llama.shapes import biased
from thinwire.model.llama.window import window_of


def rotate(heads_BNTS: Tensor, cosine_TS: Tensor, sine_TS: Tensor) -> Tensor:
    """Apply rotary positions."""
    first, second = heads_BNTS.chunk(2, dim=-1)
    return heads_BNTS * cosine_TS + torch.cat((-second, first), dim=-1) * sine_TS


def visible(time: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """Return which of `total` tokens each of the last `time` sees: itself and those before it, in a window the last so many of them."""
    seen = torch.ones(time, total, dtype=torch.bool, device=device).tril(total - time)
    return seen if window is None else seen.triu(total - time - window + 1)


class Attention(nn.Module):
    """Causal grouped-query attention that writes `width` channels."""

    def __init__(self, model: ModelConfig, layer: int, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = model.heads, model.kv_heads, model.head_size
        self.layer, self.window = layer, window_of(model, layer)
        attention_width, bias = model.heads * model.head_size, biased(model)
        self.query = nn.Linear(model.width, attention_width, bias=bias["attention.query"])
        self.key = nn.Linear(model.width, model.kv_heads * model.head_size, bias=bias["attention.key"])
        self.value = nn.Linear(model.width, model.kv_heads * model.head_size, bias=bias["attention.value"])
        self.output = nn.Linear(attention_width, width, bias=bias["attention.output"])
        self.query_norm, self.key_norm = norm_of_heads(model), norm_of_heads(model)

    def mixed(self, hidden_BTD: Tensor, each: Pass) -> Tensor:
        """Return the heads' results side by side, before the output matrix."""
        batch, time, _ = hidden_BTD.shape
        query = self.query_norm(self.query(hidden_BTD).view(batch, time, self.heads, self.head_size)).transpose(1, 2)
        key = self.key_norm(self.key(hidden_BTD).view(batch, time, self.kv_heads, self.head_size)).transpose(1, 2)
        value = self.value(hidden_BTD).view(batch, time, self.kv_heads, self.head_size).transpose(1, 2)
        documents = each.documents
        rows = (table_TS[:time] if documents is None else documents.rows(table_TS) for table_TS in each.tables)
        cosine, sine = (row.to(query.dtype) for row in rows)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        seen = None
        if each.cache is not None:
            key, value = each.cache.extend(self.layer, key, value)
        if each.cache is not None or documents is not None or (self.window is not None and self.window < time):
            seen = visible(time, key.shape[2], self.window, key.device)
            seen = seen if documents is None else seen & documents.same_B1TT
        grouped = self.kv_heads != self.heads
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=seen is None, enable_gqa=grouped)
        return mixed.transpose(1, 2).reshape(batch, time, -1)
