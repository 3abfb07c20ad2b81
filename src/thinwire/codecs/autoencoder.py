"""The learned linear boundary: the sender multiplies the stream by a matrix, the receiver by another.

    send      Z = X E^T           c numbers per token, E: c x D
    receive   X = Z R^T           R: D x c

No bias, no nonlinearity and no reconstruction loss: both matrices learn from the task's loss alone, by ordinary autograd, so the
gradient that returns is c wide too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.bits.raw import TensorSpec
from thinwire.codecs.base import Codec, LossyOptions, check_width
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context


@dataclass(frozen=True, kw_only=True)
class AutoencoderOptions(LossyOptions):
    """Options of the learned linear boundary."""

    channels: int = 16
    """Numbers per token, c; at most the model width."""


class AutoencoderExit(nn.Module):
    """Send the encoded stream."""

    def __init__(self, width: int, channels: int, wire: torch.dtype) -> None:
        super().__init__()
        self.encode = nn.Linear(width, channels, bias=False)
        nn.init.xavier_uniform_(self.encode.weight)
        self.wire = wire

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        return (self.encode(stream).to(self.wire),)


class AutoencoderEntry(nn.Module):
    """Decode what arrives to the stream's width."""

    def __init__(self, width: int, channels: int, compute: torch.dtype) -> None:
        super().__init__()
        self.decode = nn.Linear(channels, width, bias=False)
        nn.init.xavier_uniform_(self.decode.weight)
        self.compute = compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        # Cast behind the product too: autocast would hand the residual stream on in bf16.
        return self.decode(payload[0].to(self.compute)).to(self.compute)


class Autoencoder(Codec):
    """Send c learned combinations of the channels."""

    Options = AutoencoderOptions
    options: AutoencoderOptions

    def __init__(self, options: AutoencoderOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        check_width("channels", options.channels, model)

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        entry = None if plan.first else AutoencoderEntry(self.width, self.options.channels, self.compute)
        exit = None if plan.last else AutoencoderExit(self.width, self.options.channels, self.wire_dtype)
        return entry, exit

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec.raw((*source.shape[:-1], self.options.channels), self.wire_dtype),)

    def error_bound(self, source: Tensor) -> None:
        return None
