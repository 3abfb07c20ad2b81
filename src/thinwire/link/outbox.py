"""The sending half of a link's memory: credit, priority, sequence numbers, and what must be kept until the peer has it.

Callers put frames in; the I/O thread takes parts out. Credit spans from `put` here to the peer's `receive`, so whatever is queued fits the
peer's memory and the I/O thread never has to hold a frame back. Knows no socket.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

from thinwire.link.contract import Cursor
from thinwire.link.errors import LinkClosed, LinkError, ProtocolError
from thinwire.link.frame import HEADER_BYTES, MOST_PART_BYTES, PART_BYTES, UNSEQUENCED, Channel, Frame, Header, Kind, encode, pack_header
from thinwire.link.meter import LinkMeter
from thinwire.link.options import LinkOptions
from thinwire.util.runtime import REAL, Runtime

MAX_URGENT = 1024
"""Answers the link owes its peer; a peer that asks faster than it reads gets no more."""


@dataclass(slots=True)
class Outgoing:
    """A frame on its way out."""

    header: Header
    view: memoryview
    crc: int
    """Of the whole payload."""
    offset: int = 0
    """Where the next part begins."""

    def crc_of(self, offset: int, length: int) -> int:
        """Return the CRC of a part."""
        return self.crc if length == len(self.view) else zlib.crc32(self.view[offset : offset + length])


Part = tuple[int, Outgoing, int, int]
"""Sequence number, frame, and offset and length of the part in it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Bytes for one TLS write."""

    pieces: list[bytes | memoryview]
    size: int
    frames: int
    """Caller's frames that start here."""


class Outbox:
    """Frames between the caller and the wire."""

    def __init__(self, cursor: Cursor, options: LinkOptions, meter: LinkMeter, runtime: Runtime = REAL) -> None:
        self._cursor = cursor
        self._credit_frames = options.credit_frames
        self._credit_bytes = options.credit_bytes
        self._meter = meter
        self._now, self._changed = runtime.now, runtime.condition()
        self._queues: tuple[deque[Outgoing], ...] = tuple(deque() for _ in Channel)
        self._urgent: deque[bytes] = deque()
        self._retained: deque[Part] = deque()
        self._again: deque[Part] = deque()
        self._put = [(0, 0) for _ in Channel]
        self._consumed = [(0, 0) for _ in Channel]
        self._sequence = 0
        self._acknowledged = 0
        self._error: LinkError | None = None
        self._closing = False
        self._bye: int | None = None

    def put(self, frame: Frame, timeout: float | None) -> None:
        """Queue a frame; block while the credit of its channel is used up."""
        header = frame.header
        # the caller may use its buffer again at once; immutable bytes need no copy
        data = frame.payload if type(frame.payload) is bytes else bytes(frame.payload)
        assert len(data) == header.total, "build frames with Frame.make"
        view = memoryview(data)
        crc = zlib.crc32(view)
        with self._changed:
            self._await_credit(header, timeout)
            self._cursor.check(header)
            self._cursor.advance(header)
            frames, size = self._put[header.channel]
            self._put[header.channel] = (frames + 1, size + header.total)
            self._queues[header.channel].append(Outgoing(header, view, crc))

    def _await_credit(self, header: Header, timeout: float | None) -> None:
        def ready() -> bool:
            frames, size = self.outstanding(header.channel)
            fits = frames == 0 or size + header.total <= self._credit_bytes
            return self._error is not None or self._closing or (frames < self._credit_frames and fits)

        if not ready():
            started = self._now()
            arrived = self._changed.wait_for(ready, timeout)
            self._meter.blocked_seconds += self._now() - started
            if not arrived:
                frames, size = self.outstanding(header.channel)
                raise TimeoutError(
                    f"no credit on {header.channel.name} in {timeout} s: {frames} frames, {size} bytes not taken by the peer"
                )
        if self._error is not None:
            raise self._error.with_traceback(None)  # raised many times, it would collect every caller's frames
        if self._closing:
            raise LinkClosed("the link is closed on this end")

    def outstanding(self, channel: Channel) -> tuple[int, int]:
        """Return the frames and bytes that the peer has not taken yet."""
        put, consumed = self._put[channel], self._consumed[channel]
        return put[0] - consumed[0], put[1] - consumed[1]

    def put_plain(self, frame: Frame) -> None:
        """Queue a frame that is neither numbered nor kept, behind the others of its channel."""
        assert frame.header.kind in UNSEQUENCED
        view = memoryview(frame.payload)
        with self._changed:
            self._queues[frame.header.channel].append(Outgoing(frame.header, view, zlib.crc32(view)))

    def put_urgent(self, frame: Frame) -> None:
        """Queue a frame of the link itself before all others."""
        with self._changed:
            if len(self._urgent) < MAX_URGENT:
                self._urgent.append(encode(frame))

    def take(self, limit: int) -> Batch | None:
        """Return up to about `limit` bytes to write now, most urgent first."""
        pieces: list[bytes | memoryview] = []
        size = frames = 0
        with self._changed:
            while size < limit:
                if self._urgent:
                    encoded = self._urgent.popleft()
                    pieces.append(encoded)
                    size += len(encoded)
                    self._meter.sent.framed[Channel.CONTROL] += len(encoded)
                    continue
                chosen = self._next_part(min(max(limit - size - HEADER_BYTES, PART_BYTES), MOST_PART_BYTES))
                if chosen is None:
                    break
                sequence, outgoing, offset, length = chosen
                pieces.append(pack_header(outgoing.header, sequence, offset, length, outgoing.crc_of(offset, length)))
                pieces.append(outgoing.view[offset : offset + length])
                size += HEADER_BYTES + length
                frames += sequence > 0 and offset == 0
                self._meter.sent.framed[outgoing.header.channel] += HEADER_BYTES + length
                if length < PART_BYTES and limit <= HEADER_BYTES + PART_BYTES:
                    break  # on a slow line it does not wait for what follows
        return Batch(pieces, size, frames) if pieces else None

    def _next_part(self, most: int) -> Part | None:
        """Choose the next part, of at most so many bytes, and number it."""
        if self._again:
            self._meter.retransmitted += 1
            return self._again.popleft()
        queue = next((queue for queue in self._queues if queue), None)
        if queue is None:
            if not self._owes_goodbye:
                return None
            self._bye = self._sequence + 1
            header = Header(Kind.BYE, Channel.CONTROL, self._cursor.contract.epoch)
            queue = self._queues[Channel.CONTROL]
            queue.append(Outgoing(header, memoryview(b""), 0))
        outgoing = queue[0]
        offset, header = outgoing.offset, outgoing.header
        length = min(most, header.total - offset)
        outgoing.offset += length
        if outgoing.offset >= header.total:
            queue.popleft()
        if header.kind in UNSEQUENCED:
            return 0, outgoing, offset, length
        if offset == 0 and header.kind is not Kind.BYE:
            self._meter.sent.payload[header.channel] += header.total
            self._meter.sent.frames[header.channel] += 1
        self._sequence += 1
        part = (self._sequence, outgoing, offset, length)
        self._retained.append(part)
        return part

    @property
    def waiting(self) -> bool:
        """Tell whether `take` would return something."""
        return bool(self._urgent or self._again or any(self._queues) or self._owes_goodbye)

    @property
    def _owes_goodbye(self) -> bool:
        return self._closing and self._bye is None and self._error is None

    @property
    def only_goodbye(self) -> bool:
        """Tell whether this end closes and has nothing but a goodbye to say."""
        return self._closing and not any(self._queues)

    @property
    def delivered(self) -> bool:
        """Tell whether the peer has everything, the goodbye included."""
        return self._bye is not None and self._acknowledged >= self._bye

    def acknowledge(self, sequence: int, consumed: tuple[tuple[int, int], ...]) -> None:
        """Forget what the peer has received, and take back the credit of what it has consumed."""
        if not self._acknowledged <= sequence <= self._sequence:
            raise ProtocolError("acknowledged", sequence, f"{self._acknowledged} to {self._sequence}", "the peer has lost its state")
        with self._changed:
            for channel in Channel:
                old, new, put = self._consumed[channel], consumed[channel], self._put[channel]
                if not (old[0] <= new[0] <= put[0] and old[1] <= new[1] <= put[1]):
                    raise ProtocolError("consumed", new, f"{old} to {put}", f"channel {channel.name}")
                self._consumed[channel] = new
            self._acknowledged = sequence
            while self._retained and self._retained[0][0] <= sequence:
                self._retained.popleft()
            self._changed.notify_all()

    def rewind(self, received: int, consumed: tuple[tuple[int, int], ...]) -> None:
        """Prepare a new connection: everything after `received` goes again."""
        self.acknowledge(received, consumed)
        with self._changed:
            self._again = deque(self._retained)
            self._urgent.clear()

    def finish(self) -> None:
        """Send a goodbye behind everything queued; take no more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def fail(self, error: LinkError) -> None:
        """Wake every caller with an error and drop what is queued, answers excepted."""
        with self._changed:
            self._error = self._error or error
            for queue in self._queues:
                queue.clear()
            self._retained.clear()
            self._again.clear()
            self._changed.notify_all()
