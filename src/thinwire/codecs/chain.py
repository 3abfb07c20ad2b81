"""Two codecs in a row: the second one encodes what the first one would send."""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.codecs.base import Buffer, Codec, Context, Direction, TensorSpec
from thinwire.model.cut import StagePlan
from thinwire.model.stream import Stream


class ChainExit(nn.Module):
    """Encode with the first exit, then each of its tensors with the second."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        inner = self.first(stream, ids_BT, context)
        return tuple(part for tensor in inner for part in self.second(tensor, ids_BT, context))


class ChainEntry(nn.Module):
    """Decode with the second entry, `parts` tensors at a time, then with the first."""

    def __init__(self, first: nn.Module, second: nn.Module, parts: int) -> None:
        super().__init__()
        self.first, self.second, self.parts = first, second, parts

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        groups = [payload[start : start + self.parts] for start in range(0, len(payload), self.parts)]
        return self.first(tuple(self.second(group, ids_BT, context) for group in groups), ids_BT, context)


class Chain(Codec):
    """Compose two codecs; the first shapes the network, the second owns the bytes."""

    def __init__(self, first: Codec, second: Codec) -> None:
        super().__init__(first.options, first.model, seed=first.seed, compute=first.compute)
        first.wire_dtype = first.compute
        self.first, self.second = first, second
        self.constrains = first.constrains
        self.parts = len(second.spec(1, 1).tensors)

    @property
    def width(self) -> int:
        return self.first.width

    def stream(self, plan: StagePlan) -> Stream:
        return self.first.stream(plan)

    def moves_after(self, step: int) -> bool:
        return self.first.moves_after(step)

    def propose_basis(self, last: Stream) -> Tensor:
        return self.first.propose_basis(last)

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        first_entry, first_exit = self.first.ends(plan)
        second_entry, second_exit = self.second.ends(plan)
        entry = None if first_entry is None or second_entry is None else ChainEntry(first_entry, second_entry, self.parts)
        exit = None if first_exit is None or second_exit is None else ChainExit(first_exit, second_exit)
        return entry, exit

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        return tuple(part for inner in self.first.wire(source) for part in self.second.wire(inner))

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        return self.second.pack(slot % self.parts, tensor, direction)

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        return self.second.unpack(slot % self.parts, data, spec, direction)

    def error_bound(self, source: Tensor) -> Tensor:
        return self.second.error_bound(source)
