"""Entropy coding: the plain stream, or the codes of `bits`, in fewer bytes and without losing a bit.

The bytes of a tensor are sorted into planes (byte j of every element together), because sign and exponent are predictable and the
mantissa is noise, and deflated. A payload is one tag byte and then the planes, deflated where that helps; so it takes any number of
bytes up to the plain ones and one more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.bits.planes import deflate, inflate, join_planes, split_planes
from thinwire.bits.raw import Buffer, Direction, TensorSpec
from thinwire.codecs.base import Codec, LossyOptions
from thinwire.codecs.dense import Dense
from thinwire.codecs.quantize import CODES, Quantize
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan

PLAIN, DEFLATED = 0, 1


@dataclass(frozen=True, kw_only=True)
class LosslessOptions(LossyOptions):
    """Options of the entropy-coded boundary."""

    level: int = 0
    """0 codes bytes by their frequency alone; 1 to 9 also look for repeats, which takes time and gains little on activations."""


class Lossless(Codec):
    """Send the stream, or its few-bit codes, deflated."""

    Options = LosslessOptions
    options: LosslessOptions
    owns_bits = True

    def __init__(self, options: LosslessOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        if not 0 <= options.level <= 9:
            raise ValueError(f"codec.level is {options.level}; it can be 0 to 9, and 0 suits activations")
        inner = Dense if options.bits is None else Quantize
        self.inner: Codec = inner(options, model, seed=seed, compute=compute)

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        return self.inner.ends(plan)

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(spec, forward_bytes=spec.forward_bytes + 1, backward_bytes=spec.backward_bytes + 1, exact=False)
            for spec in self.inner.wire(source)
        )

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        plain = split_planes(self.inner.pack(slot, tensor, direction), self._period(slot, tensor.dtype, direction))
        deflated = deflate(plain, self.options.level)
        return bytes([PLAIN]) + plain if len(deflated) >= len(plain) else bytes([DEFLATED]) + deflated

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        size, view = spec.size(direction) - 1, memoryview(data)
        tag, body = (view[0], view[1:]) if len(view) else (None, view)
        if tag not in (PLAIN, DEFLATED):
            raise ValueError(f"payload that starts with {tag} in {len(view)} bytes where {PLAIN} or {DEFLATED} says how they are coded")
        planes = body if tag == PLAIN else inflate(body, size)
        if len(planes) != size:
            raise ValueError(f"payload of {len(planes)} bytes where {size} were declared for shape {spec.shape} {spec.dtype}")
        return self.inner.unpack(slot, join_planes(planes, self._period(slot, spec.dtype, direction)), spec, direction)

    def _period(self, slot: int, dtype: torch.dtype, direction: Direction) -> int:
        """Return after how many bytes the same bits of a value come again."""
        if isinstance(self.inner, Quantize) and slot == CODES:
            return 3 if self.inner.bits[direction] == 3 else 1
        return dtype.itemsize

    def error_bound(self, source: Tensor) -> Tensor | None:
        return self.inner.error_bound(source)
