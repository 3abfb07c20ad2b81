"""Two codecs in a row: the second one encodes what the first one would send."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from torch import Tensor, nn

from thinwire.bits.raw import Buffer, Direction, TensorSpec
from thinwire.codecs.base import Codec
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.stream import Stream


@dataclass(frozen=True)
class Origin:
    """Where a tensor of the chain's payload comes from: a tensor of the first codec, and the part of it that the second one made."""

    first: int
    second: int | None
    """None: the second codec leaves this tensor alone."""


class ChainExit(nn.Module):
    """Encode with the first exit, then each of its tensors with the second."""

    def __init__(self, first: nn.Module, second: nn.Module, untouched: frozenset[int]) -> None:
        super().__init__()
        self.first, self.second, self.untouched = first, second, untouched

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        parts: list[Tensor] = []
        for slot, tensor in enumerate(self.first(stream, ids_BT, context)):
            parts += (tensor,) if slot in self.untouched else self.second(tensor, ids_BT, context)
        return tuple(parts)


class ChainEntry(nn.Module):
    """Decode with the second entry each group of tensors that it made from one, then with the first."""

    def __init__(self, first: nn.Module, second: nn.Module, origins: tuple[Origin, ...]) -> None:
        super().__init__()
        self.first, self.second, self.origins = first, second, origins

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        groups: dict[int, list[Tensor]] = {}
        for origin, tensor in zip(self.origins, payload, strict=True):
            groups.setdefault(origin.first, []).append(tensor)
        untouched = {origin.first for origin in self.origins if origin.second is None}
        inner = [group[0] if slot in untouched else self.second(tuple(group), ids_BT, context) for slot, group in groups.items()]
        return self.first(tuple(inner), ids_BT, context)


class Chain(Codec):
    """Compose two codecs; the first shapes the network, the second owns the bytes."""

    def __init__(self, first: Codec, second: Codec) -> None:
        super().__init__(first.options, first.model, seed=first.seed, compute=first.compute)
        first.wire_dtype = first.compute
        self.first, self.second = first, second
        self.constrains = first.constrains
        parts = len(second.spec(1, 1).tensors)
        self.origins = tuple(
            origin
            for slot in range(len(first.spec(1, 1).tensors))
            for origin in ([Origin(slot, None)] if slot in first.integer_slots else [Origin(slot, part) for part in range(parts)])
        )
        self.integer_slots = frozenset(slot for slot, origin in enumerate(self.origins) if origin.second is None)
        self.exact_ids = second.exact_ids
        self.by_token = first.by_token and second.by_token

    @property
    def width(self) -> int:
        return self.first.width

    @property
    def sent_width(self) -> int:
        return self.first.sent_width

    def at(self, layer: int) -> Codec:
        first, second = self.first.at(layer), self.second.at(layer)
        return self if first is self.first and second is self.second else Chain(first, second)

    def stream(self, plan: StagePlan) -> Stream:
        return self.first.stream(plan)

    def moves_after(self, step: int) -> bool:
        return self.first.moves_after(step)

    def shares_after(self, step: int) -> bool:
        return self.first.shares_after(step)

    def propose_basis(self, last: Stream) -> Tensor:
        return self.first.propose_basis(last)

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        first_entry, first_exit = self.first.ends(plan)
        second_entry, second_exit = self.second.ends(plan)
        entry = None if first_entry is None or second_entry is None else ChainEntry(first_entry, second_entry, self.origins)
        exit = None if first_exit is None or second_exit is None else ChainExit(first_exit, second_exit, self.first.integer_slots)
        return entry, exit

    def pack_ids(self, ids: Tensor) -> bytes:
        return self.second.pack_ids(ids)

    def unpack_ids(self, data: Buffer, spec: TensorSpec) -> Tensor:
        return self.second.unpack_ids(data, spec)

    def with_end(self, end: nn.Module) -> Codec:
        assert isinstance(end, ChainExit | ChainEntry)
        found = copy(self)
        found.first, found.second = self.first.with_end(end.first), self.second.with_end(end.second)
        return found

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        parts: list[TensorSpec] = []
        for slot, inner in enumerate(self.first.wire(source)):
            parts += (inner,) if slot in self.first.integer_slots else self.second.wire(inner)
        return tuple(parts)

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        origin = self.origins[slot]
        if origin.second is None:
            return self.first.pack(origin.first, tensor, direction)
        return self.second.pack(origin.second, tensor, direction)

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        origin = self.origins[slot]
        if origin.second is None:
            return self.first.unpack(origin.first, data, spec, direction)
        return self.second.unpack(origin.second, data, spec, direction)

    def error_bound(self, source: Tensor) -> Tensor | None:
        return self.second.error_bound(source) if self.first.error_bound(source) is not None else None
