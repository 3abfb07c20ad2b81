"""A stream and the line it is sent over (pace, emulation): bytes in, bytes out, every byte of the network counted. No frames."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from thinwire.link.emulate import Wire
from thinwire.link.meter import LinkMeter
from thinwire.link.transport import ByteStream


class Connection:
    """One stream of a link."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.meter = LinkMeter()
        """Counts this connection's bytes; a link that takes the connection over puts its own here."""
        self.meter.sent.socket, self.meter.received.socket = stream.exchanged
        self.wire: Wire | None = None
        """Carries what is written from now on; None: straight to the network."""
        self._pending: deque[memoryview] = deque()

    def read(self) -> list[bytes]:
        """Return what has come; raise ConnectionError at the end of the stream."""
        count, records = self.stream.read()
        self.meter.received.socket += count
        return records

    def write(self, pieces: Iterable[bytes | memoryview], now: float, frames: int = 0) -> None:
        """Hand bytes to the wire, in the form in which they cross the network."""
        data = self.stream.seal(b"".join(pieces))
        if self.wire is None or self.wire.plain:
            self._pending.append(memoryview(data))
        else:
            self.wire.admit(data, now, frames)

    def flush(self, now: float) -> bool:
        """Give the network what has arrived at the wire's end; return whether it took all of it."""
        if self.wire is not None and not self.wire.plain:
            self._pending.extend(map(memoryview, self.wire.due(now)))
        while self._pending:
            data = self._pending[0]
            count = self.stream.send(data)
            self.meter.sent.socket += count
            if count < len(data):
                self._pending[0] = data[count:]
                return False
            self._pending.popleft()
        return True

    def underway(self) -> tuple[int, bool]:
        """Return how many bytes have arrived, as far as the network knows, and whether others are still on their way."""
        unsure = self.stream.unacknowledged()
        return self.meter.sent.socket - unsure, unsure > 0 or not self.idle

    @property
    def blocked(self) -> bool:
        """Tell whether the network still has to take something."""
        return bool(self._pending)

    @property
    def idle(self) -> bool:
        """Tell whether nothing written here is still on its way to the network."""
        return not self._pending and (self.wire is None or not self.wire.in_flight)

    def end_output(self) -> None:
        """Tell the peer that nothing more will come."""
        self.stream.end("output")

    def reset(self) -> None:
        """Break the connection at once, as a fault would."""
        self._forget()
        self.stream.end("reset")

    def close(self) -> None:
        self._forget()
        self.stream.end("close")

    def _forget(self) -> None:
        if self.wire is not None:
            self.wire.cut()
        self._pending.clear()
