"""A codec that is left off at the first boundaries or during the first steps, where the stream crosses as it is.

A warm-up changes no shape: the payload holds both the plain stream and the codec's tensors, and the side that is not in use is zeros.
A tensor of zeros takes no bytes, so only what is in use crosses.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from thinwire.bits.raw import Buffer, Direction, TensorSpec
from thinwire.codecs.base import CastEntry, CastExit, Codec, LossyOptions, absorb, attach
from thinwire.codecs.dense import Dense
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.stream import Stream
from thinwire.util.device import to_host


class Gated(Codec):
    """Use `inner` from a layer and a step on."""

    def __init__(self, inner: Codec, options: LossyOptions) -> None:
        super().__init__(options, inner.model, seed=inner.seed, compute=inner.compute)
        assert not inner.constrains and inner.sent_width == inner.width, "a codec that shapes the network cannot be left off"
        for name in ("warmup", "from_layer"):
            if getattr(options, name) < 0:
                raise ValueError(f"codec.{name} is {getattr(options, name)}; choose 0 or more")
        self.later = WarmUp(inner, options.warmup) if options.warmup else inner
        self.plain = Dense(replace(options, bits=None), inner.model, seed=inner.seed, compute=inner.compute)
        self.from_layer = options.from_layer

    def at(self, layer: int) -> Codec:
        return self.later.at(layer) if layer >= self.from_layer else self.plain

    def shares_after(self, step: int) -> bool:
        return self.later.shares_after(step)

    def stream(self, plan: StagePlan) -> Stream:
        return self.later.stream(plan)


class WarmUp(Codec):
    """Send the plain stream until a step, then what `inner` makes of it."""

    def __init__(self, inner: Codec, steps: int) -> None:
        super().__init__(inner.options, inner.model, seed=inner.seed, compute=inner.compute)
        self.inner, self.steps = inner, steps
        self.integer_slots = frozenset(slot + 1 for slot in inner.integer_slots)
        self.by_token, self.exact_ids = inner.by_token, inner.exact_ids

    def shares_after(self, step: int) -> bool:
        return self.inner.shares_after(step)

    def stream(self, plan: StagePlan) -> Stream:
        return self.inner.stream(plan)

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        entry, exit = self.inner.ends(plan)
        return (
            None if entry is None else WarmUpEntry(entry, CastEntry(self.compute), self.steps),
            None if exit is None else WarmUpExit(exit, CastExit(self.wire_dtype), self.steps, self),
        )

    def pack_ids(self, ids: Tensor) -> bytes:
        return self.inner.pack_ids(ids)

    def unpack_ids(self, data: Buffer, spec: TensorSpec) -> Tensor:
        return self.inner.unpack_ids(data, spec)

    def with_end(self, end: nn.Module) -> Codec:
        assert isinstance(end, WarmUpExit | WarmUpEntry)
        found = copy(self)
        found.inner = self.inner.with_end(end.inner)
        return found

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        plain = replace(TensorSpec.raw(source.shape, self.wire_dtype), usual=0.0)
        return tuple(replace(spec, exact=False) for spec in (plain, *self.inner.wire(source)))

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        tensor = to_host(tensor)
        if not tensor.any():
            return b""
        return super().pack(slot, tensor, direction) if slot == 0 else self.inner.pack(slot - 1, tensor, direction)

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        if not data:
            return torch.zeros(spec.shape, dtype=spec.dtype)
        return super().unpack(slot, data, spec, direction) if slot == 0 else self.inner.unpack(slot - 1, data, spec, direction)

    def error_bound(self, source: Tensor) -> Tensor | None:
        inner = self.inner.error_bound(source)
        plain = super().error_bound(source)
        return None if inner is None or plain is None else torch.maximum(inner, plain)


class WarmUpExit(nn.Module):
    """Fill the side of the payload that is in use."""

    def __init__(self, inner: nn.Module, plain: nn.Module, steps: int, codec: WarmUp) -> None:
        super().__init__()
        self.inner, self.plain, self.steps, self.codec = inner, plain, steps, codec

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        specs = self.codec.wire(TensorSpec.raw(tuple(stream.shape), self.codec.compute))
        zeros = [attach(torch.zeros(spec.shape, dtype=spec.dtype, device=stream.device), stream) for spec in specs]
        if context.step < self.steps:
            return *self.plain(stream, ids_BT, context), *zeros[1:]
        return zeros[0], *self.inner(stream, ids_BT, context)


class WarmUpEntry(nn.Module):
    """Read the side of the payload that is in use."""

    def __init__(self, inner: nn.Module, plain: nn.Module, steps: int) -> None:
        super().__init__()
        self.inner, self.plain, self.steps = inner, plain, steps

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        if context.step < self.steps:
            return absorb(self.plain(payload[:1], ids_BT, context), *payload[1:])
        return absorb(self.inner(payload[1:], ids_BT, context), payload[0])
