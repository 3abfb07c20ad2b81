"""The block of a Llama-style decoder: attention and FFN, each a branch of the residual stream.

Letters: B batch, T time, D model width, F FFN hidden, H attention width, N heads, S head size, W stream width (D, or K coordinates).
A block reads the stream through a function it is given and writes `width` channels, so it serves the ordinary and the subspace stream.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from thinwire.config.sections import ModelConfig
from thinwire.model.block import Pass
from thinwire.model.llama.attention import Attention
from thinwire.model.llama.norm import norm_behind, norm_in_front
from thinwire.model.llama.shapes import biased
from thinwire.model.noise import BRANCH, OUTPUT


class FeedForward(nn.Module):
    """SwiGLU, or the square of a ReLU, that writes `width` channels."""

    def __init__(self, model: ModelConfig, width: int) -> None:
        super().__init__()
        bias = biased(model)
        if model.ffn_kind == "swiglu":
            self.gate = nn.Linear(model.width, model.ffn, bias=bias["ffn.gate"])
        self.gated = model.ffn_kind == "swiglu"
        self.up = nn.Linear(model.width, model.ffn, bias=bias["ffn.up"])
        self.down = nn.Linear(model.ffn, width, bias=bias["ffn.down"])

    def activated(self, hidden_BTD: Tensor) -> Tensor:
        """Return the hidden units, before the output matrix."""
        if self.gated:
            return functional.silu(self.gate(hidden_BTD)) * self.up(hidden_BTD)
        return functional.relu(self.up(hidden_BTD)).square()


class LlamaBlock(nn.Module):
    """Decoder block: stream <- stream + behind(output(branch(front(read(stream))))), for attention and for the FFN."""

    def __init__(self, model: ModelConfig, layer: int, width: int, last_width: int) -> None:
        """Make a block on a stream of `width`; its FFN writes only the first `last_width` channels and drops the others."""
        super().__init__()
        self.layer, self.inner_rate, self.output_rate = layer, model.dropout, model.output_dropout
        self.attention_norm = norm_in_front(model)
        self.attention = Attention(model, layer, width)
        self.ffn_norm = norm_in_front(model)
        self.ffn = FeedForward(model, last_width)
        self.attention_output_norm = norm_behind(model, width)
        self.ffn_output_norm = norm_behind(model, last_width)

    def forward(self, stream_BTW: Tensor, read: Callable[[Tensor], Tensor], each: Pass) -> Tensor:
        mixed_BTH = self.attention.mixed(self.attention_norm(read(stream_BTW)), each)
        branch = self.attention.output(each.dropout(mixed_BTH, self.inner_rate, BRANCH, 2 * self.layer))
        stream_BTW = stream_BTW + each.dropout(self.attention_output_norm(branch), self.output_rate, OUTPUT, 2 * self.layer)
        activated_BTF = self.ffn.activated(self.ffn_norm(read(stream_BTW)))
        branch = self.ffn.down(each.dropout(activated_BTF, self.inner_rate, BRANCH, 2 * self.layer + 1))
        branch = each.dropout(self.ffn_output_norm(branch), self.output_rate, OUTPUT, 2 * self.layer + 1)
        return stream_BTW[..., : branch.shape[-1]] + branch
