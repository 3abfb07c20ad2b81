"""The low-rank boundary: each sample's stream X [T, D] crosses as a product of rank r, found by power iteration.

    Q <- qr(X^T X Q)              from a random Q [D, r], a few times
    send      P = X Q, Q          r (T + D) numbers per sample; r T on the way back
    receive   X = P Q^T

The gradient is that of the projection with Q held fixed, dX = (dX_received Q) Q^T. The study that introduced this (arXiv 2301.02654)
orthonormalises P instead, differentiates through it with Q detached, and starts from the Q of the batch before. An orthonormal Q takes the
same bytes; nothing is kept from one batch to the next, because its rows are unrelated samples and results would depend on microbatches.

Q knows the whole sequence, so later tokens influence how earlier ones are rounded: the loss of a causal model with this codec is
flattered, and such a model cannot generate token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.bits.raw import Buffer, Direction, TensorSpec, from_raw_bytes
from thinwire.codecs.base import DTYPES, Codec, LossyOptions, absorb, attach
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.noise import key
from thinwire.model.subspace.basis import random_basis

FACTOR, BASIS = 0, 1


@dataclass(frozen=True, kw_only=True)
class LowRankOptions(LossyOptions):
    """Options of the low-rank boundary."""

    rank: int = 8
    """Rank r of each sample's stream; at most the model width and the context."""
    iterations: int = 2
    """Power iterations; more come closer to the best basis of that rank."""


class LowRankExit(nn.Module):
    """Find the basis of each sample and send it with the coordinates in it."""

    start_DK: Tensor

    def __init__(self, start_DK: Tensor, iterations: int, wire: torch.dtype, basis: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("start_DK", start_DK, persistent=False)
        self.iterations, self.wire, self.basis = iterations, wire, basis

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        # A value that is not finite makes its token's coordinates so below; the basis of its sample is found without it.
        basis_BDK = dominant_basis(stream.detach().nan_to_num(0.0, 0.0, 0.0), self.start_DK, self.iterations).to(self.basis)
        return (stream @ basis_BDK.to(stream.dtype)).to(self.wire), attach(basis_BDK, stream)


class LowRankEntry(nn.Module):
    """Multiply coordinates by their basis."""

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        coords_BTK, basis_BDK = payload[FACTOR].to(self.compute), payload[BASIS].detach().to(self.compute)
        return absorb((coords_BTK @ basis_BDK.mT).to(self.compute), payload[BASIS])


def dominant_basis(stream_BTD: Tensor, start_DK: Tensor, iterations: int) -> Tensor:
    """Return orthonormal columns near each sample's strongest directions."""
    # fp64: squares neither overflow nor vanish, and autocast leaves it alone. On the CPU, since not every device has it.
    device, stream_BTD = stream_BTD.device, stream_BTD.cpu().double()
    basis_BDK = start_DK.cpu().double().expand(len(stream_BTD), -1, -1)
    for _ in range(iterations):
        basis_BDK = torch.linalg.qr(stream_BTD.mT @ (stream_BTD @ basis_BDK)).Q
    return basis_BDK.to(device, start_DK.dtype)


class LowRank(Codec):
    """Send each sample's stream as coordinates in its own basis."""

    Options = LowRankOptions
    options: LowRankOptions
    integer_slots = frozenset({BASIS})
    by_token = False

    def __init__(self, options: LowRankOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        most = min(model.width, model.context)
        if not 1 <= options.rank <= most:
            raise ValueError(f"codec.rank is {options.rank}; it can be 1 to {most}, the lesser of model.width and model.context")
        if options.iterations < 1:
            raise ValueError(f"codec.iterations is {options.iterations}; choose 1 or more, 2 is usual")
        # A quantiser behind this codec leaves the basis alone, so its format is not that of the values handed on.
        self.basis_dtype = DTYPES[options.dtype]

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        exit = None
        if not plan.last:
            start_DK = random_basis(self.width, self.options.rank, key(self.seed, plan.layers.stop))
            exit = LowRankExit(start_DK, self.options.iterations, self.wire_dtype, self.basis_dtype)
        return None if plan.first else LowRankEntry(self.compute), exit

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        batch, time, width = source.shape
        coords = TensorSpec.raw((batch, time, self.options.rank), self.wire_dtype)
        basis = TensorSpec.raw((batch, width, self.options.rank), self.basis_dtype)
        return coords, replace(basis, backward_bytes=0)

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        return b"" if slot == BASIS and direction == "backward" else super().pack(slot, tensor, direction)

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        if slot == FACTOR or direction == "forward":
            return from_raw_bytes(data, spec)
        if data:
            raise ValueError(f"payload of {len(data)} bytes where none were declared: a basis has no gradient")
        return torch.zeros(spec.shape, dtype=spec.dtype)

    def error_bound(self, source: Tensor) -> None:
        return None
