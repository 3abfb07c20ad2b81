"""The residual bottleneck (ResBM, arXiv 2604.11947): the network itself narrows to c channels in front of a boundary.

The last block of a stage writes only c channels, its gated FFN's output plus the first c channels of the residual stream (`sent_width`
makes the stage build it so). The next stage widens them with a learned matrix and adds them back into its first c channels:

    send      Z = FFN(X) + X[:c]           c numbers per token
    receive   X = Z W^T + pad(Z)           W: D x c

It needs no ids and constrains no weight, but the last block in front of a boundary has another shape than elsewhere: a model trained
with this codec keeps its cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.codecs.base import CastExit, Codec, CodecOptions, check_width
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context


@dataclass(frozen=True, kw_only=True)
class BottleneckOptions(CodecOptions):
    """Options of the residual bottleneck."""

    channels: int = 16
    """Numbers per token, c; at most the model width."""


class BottleneckEntry(nn.Module):
    """Widen c channels to the stream."""

    def __init__(self, width: int, channels: int, compute: torch.dtype) -> None:
        super().__init__()
        self.widen = nn.Linear(channels, width, bias=False)
        # The first c channels start as they were sent, the others as mixtures of them of the same size: the blocks behind find a stream
        # as large as in front of the boundary. With c = D this is the identity.
        with torch.no_grad():
            self.widen.weight.normal_(std=channels**-0.5)[:channels] = 0
        self.padding = (0, width - channels)
        self.compute = compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        narrow = payload[0].to(self.compute)
        return self.widen(narrow) + functional.pad(narrow, self.padding)


class Bottleneck(Codec):
    """Send the c channels that the last block of a stage writes."""

    Options = BottleneckOptions
    options: BottleneckOptions

    def __init__(self, options: BottleneckOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        check_width("channels", options.channels, model)

    @property
    def sent_width(self) -> int:
        return self.options.channels

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        entry = None if plan.first else BottleneckEntry(self.width, self.options.channels, self.compute)
        return entry, None if plan.last else CastExit(self.wire_dtype)

    def error_bound(self, source: Tensor) -> None:
        return None
