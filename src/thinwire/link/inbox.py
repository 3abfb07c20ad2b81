"""The receiving half of a link's memory: sequence, parts, contract, and bounded queues per channel.

`check` runs on a header before memory is taken for it, `accept` on the whole part. Both run in the I/O thread, `take` in the caller's.
Survives reconnections. Knows no socket.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import replace

from thinwire.link.contract import Cursor
from thinwire.link.errors import LinkError, ProtocolError
from thinwire.link.frame import MOST_PART_BYTES, PART_BYTES, Channel, Frame, Header, Kind
from thinwire.link.meter import LinkMeter
from thinwire.link.options import LinkOptions
from thinwire.util.runtime import REAL, Runtime

ACK = struct.Struct("<Q" + "QQ" * len(Channel))
"""Last sequence received, then frames and bytes consumed per channel, all since the link began."""


def decode_ack(payload: bytes | bytearray | memoryview) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the sequence and the consumption that an ACK reports."""
    if len(payload) != ACK.size:
        raise ProtocolError("length", len(payload), f"{ACK.size} bytes for ACK")
    sequence, *counts = ACK.unpack(payload)
    return sequence, tuple(zip(counts[::2], counts[1::2], strict=True))


class Inbox:
    """Frames between the wire and the caller."""

    def __init__(self, cursor: Cursor, options: LinkOptions, meter: LinkMeter, runtime: Runtime = REAL) -> None:
        self._cursor = cursor
        self._options = options
        self._meter = meter
        self._lock = runtime.lock()
        self._arrived = [runtime.condition(self._lock) for _ in Channel]
        self._queues: list[deque[Frame]] = [deque() for _ in Channel]
        self._pending: list[tuple[Header, bytearray] | None] = [None for _ in Channel]
        self._pending_offset = [0 for _ in Channel]
        self._unconsumed = [(0, 0) for _ in Channel]
        self._consumed = [(0, 0) for _ in Channel]
        self._fresh: set[Channel] = set()
        self._error: LinkError | None = None
        self._ended: LinkError | None = None
        self.received = 0
        self._unacknowledged_bytes = 0
        self._unreported = 0
        self._unreported_bytes = 0
        self._ack_at: float | None = None

    def check(self, header: Header) -> None:
        """Refuse by name a part that is not the next one or does not fit."""
        if header.sequence != self.received + 1:
            note = "repeated" if header.sequence <= self.received else "one before it is missing"
            raise ProtocolError("sequence", header.sequence, self.received + 1, note)
        pending = self._pending[header.channel]
        if pending is None:
            if header.offset != 0:
                raise ProtocolError("offset", header.offset, 0, "the frame has no beginning")
            self._cursor.check(header)
            self._check_credit(header)
        else:
            first, offset = pending[0], self._pending_offset[header.channel]
            if header.offset != offset or header.identity != first.identity:
                raise ProtocolError(
                    "offset", (header.offset, header.kind.name), (offset, first.kind.name), "not the next part of the frame"
                )
        rest = header.total - header.offset
        if not min(PART_BYTES, rest) <= header.length <= MOST_PART_BYTES:
            raise ProtocolError("length", header.length, f"{min(PART_BYTES, rest)} to {min(MOST_PART_BYTES, rest)} bytes in this part")

    def _check_credit(self, header: Header) -> None:
        frames, size = self._unconsumed[header.channel]
        over = size + header.total > self._options.credit_bytes and frames > 0
        if (over or frames >= self._options.credit_frames) and header.kind is not Kind.BYE:
            limit = f"within {self._options.credit_frames} frames, {self._options.credit_bytes} bytes"
            raise ProtocolError("credit", (frames + 1, size + header.total), limit, f"channel {header.channel.name}")

    def accept(self, part: Frame, now: float) -> bool:
        """Take a checked part in; tell whether it completes a frame."""
        header = part.header
        channel = header.channel
        self.received = header.sequence
        self._unacknowledged_bytes += header.length
        if self._ack_at is None:
            self._ack_at = now + self._options.ack_seconds
        pending = self._pending[channel]
        if pending is None:
            with self._lock:
                frames, size = self._unconsumed[channel]
                self._unconsumed[channel] = (frames + 1, size + header.total)
            if header.length == header.total:
                self._complete(header, part.payload if type(part.payload) is bytearray else bytearray(part.payload))
                return True
            pending = self._pending[channel] = (header, bytearray(header.total))
        first, buffer = pending
        end = header.offset + header.length
        buffer[header.offset : end] = part.payload
        self._pending_offset[channel] = end
        if end < header.total:
            return False
        self._pending[channel] = None
        self._complete(replace(first, length=first.total), buffer)
        return True

    def _complete(self, header: Header, payload: bytearray) -> None:
        self._cursor.advance(header)
        if header.kind is Kind.BYE:
            return
        self._meter.received.payload[header.channel] += header.total
        self._meter.received.frames[header.channel] += 1
        with self._lock:
            self._queues[header.channel].append(Frame(header, payload))
        self._fresh.add(header.channel)

    def announce(self) -> None:
        """Wake the callers for whom frames have come; once per read, because a woken thread takes the processor from this one."""
        if self._fresh:
            with self._lock:
                for channel in self._fresh:
                    self._arrived[channel].notify_all()
            self._fresh.clear()

    def take(self, channel: Channel, timeout: float | None) -> Frame:
        """Return the channel's next frame; raise once the link has failed, or has ended and is empty."""
        queue, arrived = self._queues[channel], self._arrived[channel]
        with self._lock:
            if not arrived.wait_for(lambda: queue or self._error or self._ended, timeout):
                raise TimeoutError(f"no frame on {channel.name} in {timeout} s")
            if self._error is not None:
                raise self._error.with_traceback(None)  # raised many times, it would collect every caller's frames
            if not queue:
                assert self._ended is not None
                raise self._ended.with_traceback(None)
            frame = queue.popleft()
            size = frame.header.total
            self._unconsumed[channel] = (self._unconsumed[channel][0] - 1, self._unconsumed[channel][1] - size)
            self._consumed[channel] = (self._consumed[channel][0] + 1, self._consumed[channel][1] + size)
            self._unreported += 1
            self._unreported_bytes += size
        return frame

    @property
    def report_due(self) -> bool:
        """Tell whether the peer should hear soon that there is credit again."""
        return self._unreported * 4 >= self._options.credit_frames or self._unreported_bytes * 4 >= self._options.credit_bytes

    def ack_due(self, now: float) -> bool:
        """Tell whether an ACK should go now."""
        overdue = self._ack_at is not None and now >= self._ack_at
        return overdue or self.report_due or self._unacknowledged_bytes >= self._options.ack_bytes

    @property
    def ack_at(self) -> float | None:
        """Return when an ACK is due at the latest."""
        return self._ack_at

    def acknowledgement(self) -> bytes:
        """Return the payload of an ACK and start counting anew."""
        with self._lock:
            self._unreported = self._unreported_bytes = 0
            counts = [count for pair in self._consumed for count in pair]
        self._unacknowledged_bytes = 0
        self._ack_at = None
        return ACK.pack(self.received, *counts)

    def consumed(self) -> tuple[tuple[int, int], ...]:
        """Return frames and bytes consumed per channel."""
        with self._lock:
            return tuple(self._consumed)

    def held(self, channel: Channel) -> tuple[int, int]:
        """Return the frames and bytes that wait for the caller, begun ones included."""
        return self._unconsumed[channel]

    def end(self, error: LinkError) -> None:
        """Let callers take what is queued, then raise."""
        with self._lock:
            self._ended = self._ended or error
            self._notify()

    def fail(self, error: LinkError) -> None:
        """Wake every caller with an error."""
        with self._lock:
            self._error = self._error or error
            for queue in self._queues:
                queue.clear()
            self._pending = [None for _ in Channel]
            self._notify()

    def _notify(self) -> None:
        for condition in self._arrived:
            condition.notify_all()
