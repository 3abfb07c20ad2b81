"""One boundary in one process: payloads are packed, counted, checked and unpacked as on a wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.bits.marks import marks_size, pack_marks, plain_ids, unpack_marks
from thinwire.bits.raw import Buffer, Direction, TensorSpec, from_raw_bytes, raw_bytes
from thinwire.codecs.base import Codec, WireSpec
from thinwire.pipeline.meter import Meter

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True)
class Packed:
    """The bytes of one payload, or of its gradient, and the version of the basis they are written in."""

    version: int
    ids: bytes
    tensors: tuple[bytes, ...]


def ids_spec(batch: int, time: int, vocabulary: int, exact: bool = True) -> TensorSpec:
    """Describe the ids that ride forward, time + 1 per sequence: uint16 where the vocabulary fits, else int32."""
    raw = TensorSpec.raw((batch, time + 1), torch.uint16 if vocabulary <= 2**16 else torch.int32)
    return TensorSpec(raw.shape, raw.dtype, raw.forward_bytes, 0, exact)


def ids_slot(codec: Codec, batch: int, time: int, *, known: bool = False, marked: bool = False) -> Slot:
    """Describe the ids that ride forward, time + 1 per sequence; those that the receiver knows do not travel."""
    spec = ids_spec(batch, time, codec.model.vocabulary, codec.exact_ids)
    marks = marks_size(batch, time) if marked else 0
    return Slot(replace(spec, forward_bytes=spec.forward_bytes + marks), None, "forward", known, marks)


@dataclass(frozen=True)
class Slot:
    """One tensor of a payload in one direction; `index` is the codec's number for it, None for ids, of which those forward are coded."""

    spec: TensorSpec
    index: int | None
    direction: Direction
    known: bool = False
    """Whether the receiver has it by itself, and it takes no byte."""
    marks: int = 0
    """Bytes behind ids that say which of them count in the loss."""

    def pack(self, codec: Codec, tensor: Tensor) -> bytes:
        if self.marks:
            return replace(self, marks=0).pack(codec, plain_ids(tensor[:, :-1])) + pack_marks(tensor)
        if self.index is None:
            ids = tensor.to(self.spec.dtype)
            return codec.pack_ids(ids) if self.direction == "forward" else raw_bytes(ids)
        return codec.pack(self.index, tensor, self.direction)

    def unpack(self, codec: Codec, data: Buffer) -> Tensor:
        if self.marks:
            plain = replace(self, spec=replace(self.spec, forward_bytes=self.spec.forward_bytes - self.marks), marks=0)
            return unpack_marks(data[-self.marks :], plain.unpack(codec, data[: -self.marks]))
        if self.index is None:
            ids = codec.unpack_ids(data, self.spec) if self.direction == "forward" else from_raw_bytes(data, self.spec)
            return checked_ids(ids, codec.model.vocabulary)
        return codec.unpack(self.index, data, self.spec, self.direction)


def checked_ids(ids_BT1: Tensor, vocabulary: int) -> Tensor:
    """Refuse ids that are no tokens: features from a hash would take any number."""
    smallest, largest = (int(each) for each in torch.aminmax(ids_BT1.to(torch.int64)))
    if smallest < 0 or largest >= vocabulary:
        raise ValueError(
            f"an id of {largest if largest >= vocabulary else smallest} came from the stage before; tokens are 0 to {vocabulary - 1}"
        )
    return ids_BT1


def slots(codec: Codec, batch: int, context: int, *, known_ids: bool = False, marked: bool = False) -> dict[Direction, tuple[Slot, ...]]:
    """List what crosses a boundary for one microbatch: ids, unless all stages know them, and payload forward, its gradient backward."""
    tensors, ids = codec.spec(batch, context).tensors, ids_slot(codec, batch, context, known=known_ids, marked=marked)
    forward, backward = (tuple(Slot(spec, index, way) for index, spec in enumerate(tensors)) for way in DIRECTIONS)
    return {"forward": (ids, *forward), "backward": backward}


class Boundary:
    """Carry payloads of one fixed form."""

    def __init__(
        self,
        codec: Codec,
        batch: int,
        time: int,
        ends: tuple[nn.Module, nn.Module] | None = None,
        *,
        known_ids: bool = False,
        marked: bool = False,
    ) -> None:
        """Join the exit of one stage and the entry of the next, which a codec that learns at its ends must be given."""
        exit, entry = (codec, codec) if ends is None else map(codec.with_end, ends)
        self.packing = {"forward": exit, "backward": entry}
        self.unpacking = {"forward": entry, "backward": exit}
        each = slots(codec, batch, time, known_ids=known_ids, marked=marked)
        self.ids_slot, *payload = each["forward"]
        self.payload = {"forward": payload, "backward": each["backward"]}
        self.spec: WireSpec = codec.spec(batch, time)
        self.meter = Meter()

    def pack(self, tensors: Sequence[Tensor], direction: Direction, version: int, ids_BT1: Tensor | None = None) -> Packed:
        """Turn a payload into bytes."""
        started = time.perf_counter()
        ids = b"" if ids_BT1 is None or self.ids_slot.known else self.ids_slot.pack(self.packing["forward"], ids_BT1)
        parts = tuple(slot.pack(self.packing[direction], tensor) for slot, tensor in zip(self.payload[direction], tensors, strict=True))
        self.meter.encode_seconds += time.perf_counter() - started
        return Packed(version, ids, parts)

    def count(self, packed: Packed, direction: Direction) -> None:
        """Enter a payload's bytes into the meter."""
        size = sum(map(len, packed.tensors))
        if direction == "forward":
            self.meter.tokens += self.spec.tokens
            self.meter.forward += size + len(packed.ids)
            self.meter.ids += len(packed.ids)
        else:
            self.meter.backward += size

    def unpack(self, packed: Packed, direction: Direction, version: int) -> tuple[Tensor, ...]:
        """Turn bytes back into the payload; a payload written in another basis is an error."""
        if packed.version != version:
            raise ValueError(f"payload in basis version {packed.version} where version {version} is in use; the stages have lost step")
        if len(packed.tensors) != len(self.spec.tensors):
            raise ValueError(f"payload of {len(packed.tensors)} tensors where {len(self.spec.tensors)} were declared")
        started = time.perf_counter()
        tensors = tuple(
            slot.unpack(self.unpacking[direction], data) for slot, data in zip(self.payload[direction], packed.tensors, strict=True)
        )
        self.meter.decode_seconds += time.perf_counter() - started
        return tensors

    def unpack_ids(self, packed: Packed) -> Tensor:
        """Return the ids that rode with a payload."""
        return self.ids_slot.unpack(self.unpacking["forward"], packed.ids).to(torch.int64)
