"""Dynamic communication thresholding (Gupta et al., arXiv 2010.08899), its model-parallel half: send what exceeds a stale threshold.

    forward    M = |X| >= tau,  send the values X[M] and the mask M
    backward   send the gradient's values at M; the receiver of the gradient holds M, so no positions travel

Finding the threshold is the dear part of choosing the largest values, so tau is kept for many steps. A stale tau misses the density where
the stream's scale moves, so it is renewed often at the start, and early once the density of a step was off. Only this exit's boundary
knows tau: it is never sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.bits.codes import packed_size
from thinwire.bits.grid import FORMAT
from thinwire.bits.mask import BITMAP, at_least, kept_count, no_gradient, pack_mask, pick, unpack_mask
from thinwire.bits.raw import Buffer, Direction, TensorSpec, pack_front, unpack_front
from thinwire.codecs.base import Codec, LossyOptions, attach
from thinwire.codecs.masked import MaskEntry
from thinwire.codecs.sparsify import MASK, VALUES, check_density
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.host import HostBuffers


@dataclass(frozen=True, kw_only=True)
class ThresholdOptions(LossyOptions):
    """Options of the thresholded boundary."""

    density: float = 0.05
    """Share of a microbatch's values that the threshold aims to send."""
    lifespan: int = 100
    """Most steps that a threshold is kept for; the first ones are kept for 1, 2, 4, ... steps."""
    slack: float = 1.5
    """Renew the threshold early when a step's density was off by more than this factor; `inf`: never."""


class ThresholdExit(HostBuffers):
    """Send the values of at least tau in size, and a mask of where they are."""

    on_host = ("step", "renewed", "interval")
    tau: Tensor
    step: Tensor
    renewed: Tensor
    interval: Tensor
    newest: Tensor
    kept: Tensor
    seen: Tensor

    def __init__(self, options: ThresholdOptions, wire: torch.dtype, compute: torch.dtype) -> None:
        super().__init__()
        self.options, self.wire = options, wire
        self.register_buffer("tau", torch.zeros((), dtype=compute))
        # The training step under way and the newest sample of it that was counted; -1: none yet.
        self.register_buffer("step", torch.tensor(-1))
        self.register_buffer("newest", torch.tensor(-1))
        # The step that tau is from, and the steps that it is kept for.
        self.register_buffer("renewed", torch.tensor(-1))
        self.register_buffer("interval", torch.tensor(0))
        # Values sent and values in all, in the step under way.
        self.register_buffer("kept", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        sizes = stream.detach().abs()
        if context.training and context.step != self.step:
            self._begin(context.step, sizes)
        tau = self._exact_tau(sizes) if self.step < 0 else self.tau
        mask = at_least(sizes, tau)
        if context.training:
            self._count(mask, context.samples_B)
        return pick(stream, mask, mask.numel()).to(self.wire), attach(mask.to(FORMAT), stream)

    def _exact_tau(self, sizes: Tensor) -> Tensor:
        """Return the threshold that keeps just the wanted share of the values."""
        return sizes.flatten().topk(kept_count(self.options.density, sizes.numel())).values[-1]

    def _begin(self, step: int, sizes: Tensor) -> None:
        """Begin a training step with its first microbatch: renew tau if it is old or was off, and count anew.

        A microbatch that is computed again finds its step begun and changes nothing.
        """
        if self.step < 0 or step >= self.renewed + self.interval or self._is_off():
            self.tau.copy_(self._exact_tau(sizes))
            self.renewed.fill_(step)
            self.interval.mul_(2).clamp_(1, self.options.lifespan)
        self.step.fill_(step)
        self.newest.fill_(-1)
        self.kept.zero_()
        self.seen.zero_()

    def _is_off(self) -> bool:
        ratio = float(self.kept / self.seen) / self.options.density
        return not 1 / self.options.slack <= ratio <= self.options.slack

    def _count(self, mask: Tensor, samples_B: Tensor) -> None:
        """Add a microbatch to the step's density, once: samples rise from one microbatch of a step to the next."""
        fresh = samples_B[-1] > self.newest
        self.newest.copy_(torch.where(fresh, samples_B[-1], self.newest))
        self.kept += torch.where(fresh, mask.count_nonzero(), 0)
        self.seen += torch.where(fresh, mask.numel(), 0)

    def figures(self) -> dict[str, float]:
        """Return the share of values sent in the training step under way, or in the last one."""
        density = float(self.kept / self.seen)
        return {} if math.isnan(density) else {"density": density}


class Threshold(Codec):
    """Send the values above a threshold that is renewed now and then."""

    Options = ThresholdOptions
    options: ThresholdOptions
    integer_slots = frozenset({MASK})
    depends_on_microbatch = True  # the threshold is that of a step's first one

    def __init__(self, options: ThresholdOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        check_density(options.density)
        if options.lifespan < 1:
            raise ValueError(f"codec.lifespan is {options.lifespan}; choose 1 step or more, such as 100")
        if not options.slack > 1:
            raise ValueError(f"codec.slack is {options.slack}; choose a factor above 1, such as 1.5")
        if options.bits is not None:
            raise ValueError(
                f"codec.bits is {options.bits}, but `threshold` sends a number of values that varies, which cannot be quantised by token; "
                "leave codec.bits unset, or choose the codec `topk`"
            )

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        entry = None if plan.first else MaskEntry(self.compute)
        exit = None if plan.last else ThresholdExit(self.options, self.wire_dtype, self.compute)
        return entry, exit

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        count = math.prod(source.shape)
        most = count * self.wire_dtype.itemsize
        values = TensorSpec((count,), self.wire_dtype, most, most, exact=False, usual=self.options.density)
        return values, TensorSpec(source.shape, FORMAT, len(BITMAP) + packed_size(count, 1), 0, exact=False)

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        if slot == VALUES:
            return pack_front(tensor)
        return b"" if direction == "backward" else pack_mask(tensor)

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        if slot == VALUES:
            return unpack_front(data, spec)
        return no_gradient(data, spec) if direction == "backward" else unpack_mask(data, spec)

    def error_bound(self, source: Tensor) -> None:
        """State no bound: a stale threshold may drop anything."""
