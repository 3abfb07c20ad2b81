"""The parts of a Llama-style decoder: RMSNorm, rotary grouped-query attention, SwiGLU, pre-norm block.

Letters: B batch, T time, D model width, F FFN hidden, H attention width, N heads, S head size, W stream width (D, or K coordinates).
A block reads the stream through a function it is given and writes `width` channels, so it serves the ordinary and the subspace stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.config.sections import ModelConfig
from thinwire.model.block import Pass
from thinwire.model.noise import BRANCH, OUTPUT


class RMSNorm(nn.Module):
    """Divide by the root mean square, multiply by gains."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self.eps)


def rotary_tables(model: ModelConfig, positions: range) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles, [T, S], the two halves of S alike (Hugging Face's layout)."""
    half = torch.arange(0, model.head_size, 2, dtype=torch.float64) / model.head_size
    angles = torch.outer(torch.arange(positions.start, positions.stop, dtype=torch.float64), model.rope_theta**-half)
    angles_TS = torch.cat((angles, angles), dim=-1)
    return angles_TS.cos(), angles_TS.sin()


def rotate(heads_BNTS: Tensor, cosine_TS: Tensor, sine_TS: Tensor) -> Tensor:
    """Apply rotary positions."""
    first, second = heads_BNTS.chunk(2, dim=-1)
    return heads_BNTS * cosine_TS + torch.cat((-second, first), dim=-1) * sine_TS


class Attention(nn.Module):
    """Causal grouped-query attention that writes `width` channels."""

    def __init__(self, model: ModelConfig, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = model.heads, model.kv_heads, model.head_size
        attention_width = model.heads * model.head_size
        self.query = nn.Linear(model.width, attention_width, bias=False)
        self.key = nn.Linear(model.width, model.kv_heads * model.head_size, bias=False)
        self.value = nn.Linear(model.width, model.kv_heads * model.head_size, bias=False)
        self.output = nn.Linear(attention_width, width, bias=model.output_bias)

    def mixed(self, hidden_BTD: Tensor, each: Pass, layer: int) -> Tensor:
        """Return the heads' results side by side, before the output matrix."""
        batch, time, _ = hidden_BTD.shape
        query = self.query(hidden_BTD).view(batch, time, self.heads, self.head_size).transpose(1, 2)
        key = self.key(hidden_BTD).view(batch, time, self.kv_heads, self.head_size).transpose(1, 2)
        value = self.value(hidden_BTD).view(batch, time, self.kv_heads, self.head_size).transpose(1, 2)
        cosine, sine = (table_TS[:time].to(query.dtype) for table_TS in each.tables)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        grouped = self.kv_heads != self.heads
        if each.cache is None:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        else:
            key, value = each.cache.extend(layer, key, value)
            seen = torch.ones(time, key.shape[2], dtype=torch.bool, device=key.device).tril(key.shape[2] - time)
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=grouped)
        return mixed.transpose(1, 2).reshape(batch, time, -1)


class FeedForward(nn.Module):
    """SwiGLU that writes `width` channels."""

    def __init__(self, model: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(model.width, model.ffn, bias=False)
        self.up = nn.Linear(model.width, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, width, bias=model.output_bias)

    def activated(self, hidden_BTD: Tensor) -> Tensor:
        """Return the gated hidden units, before the output matrix."""
        return functional.silu(self.gate(hidden_BTD)) * self.up(hidden_BTD)


class LlamaBlock(nn.Module):
    """Pre-norm decoder block: stream <- stream + output(branch(norm(read(stream))))."""

    def __init__(self, model: ModelConfig, layer: int, width: int, last_width: int) -> None:
        """Make a block on a stream of `width`; its FFN writes only the first `last_width` channels and drops the others."""
        super().__init__()
        self.layer, self.inner_rate, self.output_rate = layer, model.dropout, model.output_dropout
        self.attention_norm = RMSNorm(model.width, model.norm_eps)
        self.attention = Attention(model, width)
        self.ffn_norm = RMSNorm(model.width, model.norm_eps)
        self.ffn = FeedForward(model, last_width)
        gains = model.branch_norm_gains
        self.attention_output_norm = RMSNorm(width, model.norm_eps) if gains else nn.Identity()
        self.ffn_output_norm = RMSNorm(last_width, model.norm_eps) if gains else nn.Identity()

    def forward(self, stream_BTW: Tensor, read: Callable[[Tensor], Tensor], each: Pass) -> Tensor:
        mixed_BTH = self.attention.mixed(self.attention_norm(read(stream_BTW)), each, self.layer)
        branch = self.attention.output(each.dropout(mixed_BTH, self.inner_rate, BRANCH, 2 * self.layer))
        stream_BTW = stream_BTW + each.dropout(self.attention_output_norm(branch), self.output_rate, OUTPUT, 2 * self.layer)
        activated_BTF = self.ffn.activated(self.ffn_norm(read(stream_BTW)))
        branch = self.ffn.down(each.dropout(activated_BTF, self.inner_rate, BRANCH, 2 * self.layer + 1))
        branch = each.dropout(self.ffn_output_norm(branch), self.output_rate, OUTPUT, 2 * self.layer + 1)
        return stream_BTW[..., : branch.shape[-1]] + branch
