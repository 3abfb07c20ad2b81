"""Frames on the wire: header, encoding, and a parser that refuses a header before it takes memory for a payload.

A long frame travels as parts, each with the full header and its offset, so that a more urgent frame waits for one part at most. On a slow
line header and part fill one TLS record; a fast one takes more at once. Whether a frame is expected is the contract's business.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from thinwire.link.errors import ProtocolError

MAGIC = b"thwr"
VERSION = 3
MAX_DIMS = 4
EPOCHS = 2**31
"""Epochs are below this: a header holds them, and there is room for the next one."""
# magic, version, kind, channel, dtype, rank of dims, tensor, epoch, step, microbatch, basis, sequence, dims, length, offset, total
BODY = struct.Struct("<4sBBBBBxHIIIIQ4IIQQ")
CRC = struct.Struct("<I")
HEADER_BYTES = BODY.size + CRC.size
PART_BYTES = 16 * 2**10 - HEADER_BYTES
"""Least bytes of a part that is not the last of its frame."""
MOST_PART_BYTES = 256 * 2**10 - HEADER_BYTES
"""Most bytes of a part."""


class Kind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    DATA = 2
    STEP = 3
    BASIS = 4
    SNAPSHOT = 5
    ACK = 6
    PING = 7
    PONG = 8
    ABORT = 9
    VOTE = 10
    BYE = 11


class Channel(IntEnum):
    """Queues of a link; a lower number always goes first."""

    CONTROL = 0
    BOUNDARY = 1
    EXCHANGE = 2
    BULK = 3


class Dtype(IntEnum):
    """Codes of the element types that a header may name; RAW: bytes that only the codec understands."""

    RAW = 0
    FP64 = 1
    FP32 = 2
    FP16 = 3
    BF16 = 4
    UINT8 = 5
    UINT16 = 6
    INT32 = 7
    INT64 = 8


UNSEQUENCED = frozenset({Kind.HELLO, Kind.ACK, Kind.PING, Kind.PONG, Kind.ABORT})
"""The link's own kinds: not numbered, not resent, never in parts."""
CHANNELS: dict[Kind, frozenset[Channel]] = {
    Kind.HELLO: frozenset({Channel.CONTROL}),
    Kind.DATA: frozenset({Channel.BOUNDARY, Channel.EXCHANGE}),
    Kind.STEP: frozenset({Channel.CONTROL, Channel.BOUNDARY}),
    Kind.BASIS: frozenset({Channel.CONTROL, Channel.BOUNDARY}),
    Kind.SNAPSHOT: frozenset({Channel.BULK}),
    Kind.ACK: frozenset({Channel.CONTROL}),
    Kind.PING: frozenset({Channel.CONTROL, Channel.BULK}),
    Kind.PONG: frozenset({Channel.CONTROL}),
    Kind.ABORT: frozenset({Channel.CONTROL}),
    Kind.VOTE: frozenset({Channel.CONTROL}),
    Kind.BYE: frozenset({Channel.CONTROL}),
}
HOME = {kind: min(channels) for kind, channels in CHANNELS.items()}
"""The channel a frame of each kind takes unless told otherwise."""
KINDS = {int(kind): kind for kind in Kind}
CHANNEL_OF = {int(channel): channel for channel in Channel}


@dataclass(frozen=True, slots=True)
class Header:
    """Describe one frame, or one part of it: `length` bytes at `offset` of `total`."""

    kind: Kind
    channel: Channel
    epoch: int = 0
    step: int = 0
    microbatch: int = 0
    tensor: int = 0
    basis_version: int = 0
    sequence: int = 0
    dtype: int = 0
    dims: tuple[int, ...] = ()
    length: int = 0
    offset: int = 0
    total: int = 0
    crc32: int = 0

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what all parts of a frame have in common."""
        place = (self.epoch, self.step, self.microbatch, self.tensor, self.basis_version)
        return (self.kind, self.channel, place, self.dtype, self.dims, self.total)


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and its bytes; a received payload is a `bytearray` of its own."""

    header: Header
    payload: bytes | bytearray | memoryview

    @classmethod
    def make(cls, kind: Kind, payload: bytes | bytearray | memoryview = b"", *, channel: Channel | None = None, **fields) -> Frame:
        """Build a whole frame; `fields` are those of `Header`."""
        size = memoryview(payload).nbytes
        return cls(Header(kind, HOME[kind] if channel is None else channel, length=size, total=size, **fields), payload)


def pack_header(header: Header, sequence: int, offset: int, length: int, payload_crc: int) -> bytes:
    """Encode the header of one part; the CRC covers header and payload."""
    dims = header.dims
    body = BODY.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.channel,
        header.dtype,
        len(dims),
        header.tensor,
        header.epoch,
        header.step,
        header.microbatch,
        header.basis_version,
        sequence,
        *dims,
        *(0,) * (MAX_DIMS - len(dims)),
        length,
        offset,
        header.total,
    )
    return body + CRC.pack(zlib.crc32(body, payload_crc))


def encode(frame: Frame) -> bytes:
    """Encode a frame, or a part, as it stands."""
    header = frame.header
    return pack_header(header, header.sequence, header.offset, header.length, zlib.crc32(frame.payload)) + bytes(frame.payload)


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Decode a header; refuse by name what no link sends."""
    magic, version, kind, channel, dtype, rank, tensor, epoch, step, microbatch, basis, sequence, *dims, length, offset, total = (
        BODY.unpack_from(data)
    )
    if magic != MAGIC:
        raise ProtocolError("magic", magic, MAGIC)
    if version != VERSION:
        raise ProtocolError("version", version, VERSION, "the two ends run different releases of thinwire")
    if kind not in KINDS:
        raise ProtocolError("kind", kind, f"one of 1 to {max(KINDS)}")
    if channel not in CHANNEL_OF or CHANNEL_OF[channel] not in CHANNELS[KINDS[kind]]:
        raise ProtocolError("channel", channel, f"one that {KINDS[kind].name} may take")
    if rank > MAX_DIMS or any(dims[rank:]):
        raise ProtocolError("dims", (rank, *dims), f"at most {MAX_DIMS}, the others 0")
    if offset + length > total:
        raise ProtocolError("length", length, f"at most {total} - {offset}, the rest of the frame")
    (crc,) = CRC.unpack_from(data, BODY.size)
    return Header(
        KINDS[kind],
        CHANNEL_OF[channel],
        epoch,
        step,
        microbatch,
        tensor,
        basis,
        sequence,
        dtype,
        tuple(dims[:rank]),
        length,
        offset,
        total,
        crc,
    )


class Parser:
    """Cut a byte stream into frames.

    `check(header)` raises what is not expected, before memory is taken. Frames are yielded one by one, so that the caller can take in
    each before the next header is checked: exhaust the iterator before the next `feed`.
    """

    def __init__(self, check: Callable[[Header], None]) -> None:
        self._check = check
        self._start = bytearray()
        self._header: Header | None = None
        self._header_crc_start = b""
        self._payload = bytearray()
        self._filled = 0

    @property
    def held_bytes(self) -> int:
        """Return the memory taken for an unfinished frame."""
        return len(self._start) + len(self._payload)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Take bytes in; yield the frames they complete. A payload that lies whole in `data` is a view of it, else a bytearray."""
        rest = memoryview(data)
        while True:
            if self._header is None:
                rest = self._take_header(rest)
                if self._header is None:
                    return
            header = self._header
            payload: memoryview | bytearray
            if not self._payload and len(rest) >= header.length:
                payload, rest = rest[: header.length], rest[header.length :]
            else:
                rest = self._fill(rest, header.length)
                if self._filled < header.length:
                    return
                payload, self._payload = self._payload, bytearray()
            found = zlib.crc32(self._header_crc_start, zlib.crc32(payload))
            if found != header.crc32:
                raise ProtocolError("crc32", f"{found:08x}", f"{header.crc32:08x}", "the bytes were damaged")
            self._header = None
            yield Frame(header, payload)

    def _take_header(self, rest: memoryview) -> memoryview:
        """Complete and check a header if there are bytes enough."""
        if self._start or len(rest) < HEADER_BYTES:
            missing = HEADER_BYTES - len(self._start)
            self._start += rest[:missing]
            rest = rest[missing:]
            if len(self._start) < HEADER_BYTES:
                return rest
            encoded = bytes(self._start)
            self._start.clear()
        else:
            encoded, rest = bytes(rest[:HEADER_BYTES]), rest[HEADER_BYTES:]
        header = decode_header(encoded)
        self._check(header)
        self._header = header
        self._header_crc_start = encoded[: BODY.size]
        self._filled = 0
        return rest

    def _fill(self, rest: memoryview, length: int) -> memoryview:
        """Copy bytes into the unfinished payload."""
        if not self._payload:
            self._payload = bytearray(length)
        count = min(len(rest), length - self._filled)
        self._payload[self._filled : self._filled + count] = rest[:count]
        self._filled += count
        return rest[count:]
