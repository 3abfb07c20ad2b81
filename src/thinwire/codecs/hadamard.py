"""A rotation in front of the quantiser: random signs and a fast Walsh-Hadamard transform, undone by the receiver.

    send      Y = H S X           S: signs by (seed, layer), H: orthonormal and symmetric, over blocks of channels
    receive   X = S H Y

A few large channels make the scale of a token large and so its codes coarse; rotated, every channel holds a share of them. The gradient
goes back through the same rotation, so the quantiser behind sees it rotated too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.codecs.base import Codec, LossyOptions
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.noise import key, uniform


@dataclass(frozen=True, kw_only=True)
class HadamardOptions(LossyOptions):
    """Options of the rotated boundary."""

    bits: int | None = 4
    """Quantise the rotated stream to this many bits (8, 4, 3, 2 or 1)."""


class HadamardExit(nn.Module):
    """Rotate the stream."""

    signs_D: Tensor

    def __init__(self, signs_D: Tensor, wire: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("signs_D", signs_D, persistent=False)
        self.wire = wire

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        return (transform(stream * self.signs_D).to(self.wire),)


class HadamardEntry(nn.Module):
    """Rotate back."""

    signs_D: Tensor

    def __init__(self, signs_D: Tensor, compute: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("signs_D", signs_D, persistent=False)
        self.compute = compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        return transform(payload[0].to(self.compute)) * self.signs_D


def transform(values: Tensor) -> Tensor:
    """Multiply blocks of channels, as long as the largest power of two that divides their number, by the orthonormal Hadamard matrix."""
    width = values.shape[-1]
    block = width & -width
    result, half = values, 1
    while half < block:
        first, second = result.unflatten(-1, (-1, 2, half)).unbind(-2)
        result = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return result * block**-0.5


class Hadamard(Codec):
    """Send the stream rotated."""

    Options = HadamardOptions

    def signs(self, layer: int) -> Tensor:
        """Return the signs of the boundary in front of a layer."""
        drawn_D = uniform(torch.tensor([key(self.seed, layer)]), (1, self.width))[0]
        return (drawn_D < 0.5).to(self.compute) * 2 - 1

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        entry = None if plan.first else HadamardEntry(self.signs(plan.layers.start), self.compute)
        exit = None if plan.last else HadamardExit(self.signs(plan.layers.stop), self.wire_dtype)
        return entry, exit

    def error_bound(self, source: Tensor) -> None:
        # A bound for rotated values says nothing about single values behind the rotation.
        return None
