"""One TLS connection over a non-blocking socket, without a thread: bytes in, bytes out, every socket byte counted.

SSLObject and MemoryBIO keep TLS apart from the socket, so a wire (pace, emulation) fits between them. Knows no frames.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

from thinwire.link.emulate import Wire
from thinwire.link.meter import Meter
from thinwire.link.options import LinkOptions

try:
    import fcntl
    import termios
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

READ_BYTES = 256 * 2**10
HANDSHAKE_BYTES = 16 * 2**10
"""Read at once before the peer has proven who it is."""
RECORD_BYTES = 16 * 2**10
TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if hasattr(socket, "TCP_CONGESTION") else None)


def tune(sock: socket.socket, options: LinkOptions) -> str:
    """Set a TCP socket up for small latency; return the congestion control in use."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if TCP_NOTSENT_LOWAT is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, options.unsent_bytes)
    if not hasattr(socket, "TCP_CONGESTION"):
        return "unknown"
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.congestion.encode())
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def unacknowledged(sock: socket.socket) -> int:
    """Return the bytes of a TCP socket that its peer has not acknowledged; 0 where the system does not tell."""
    if fcntl is None:
        return 0
    count = bytearray(4)
    try:
        fcntl.ioctl(sock, termios.TIOCOUTQ, count)
    except (OSError, ValueError):  # it is closed
        return 0
    return int.from_bytes(count, sys.byteorder)


class Connection:
    """A TLS session on a connected socket."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, congestion: str = "unknown", name: str | None = None
    ) -> None:
        """Begin a session; a client may call the server by a name."""
        self.socket = sock
        self.congestion = congestion
        self.meter = Meter()
        """Counts this connection's bytes; a link that takes the connection over puts its own here."""
        self.wire: Wire | None = None
        """Carries what is written from now on; None: straight to the socket."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=name)
        self._pending: deque[memoryview] = deque()
        self._view = memoryview(bytearray(HANDSHAKE_BYTES))

    def handshake(self) -> bool:
        """Go on with the handshake; return whether it is done. Raises ssl.SSLError with the reason, told to the peer too."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    if not self._receive():
                        return False
                else:
                    return True
        finally:
            # an alert that cannot be sent must not hide the error it is about
            with contextlib.suppress(OSError):
                self._collect(0.0, 0)
                self.flush(0.0)

    def peer_certificate(self) -> bytes:
        """Return the peer's certificate in DER."""
        return self._tls.getpeercert(binary_form=True) or b""

    def shown_certificate(self) -> bytes | None:
        """Return the certificate (DER) that the peer showed, also if it was refused; None: it cannot be told."""
        # public from Python 3.13 on; before, the object beneath has it, and returns other objects
        chain = getattr(self._tls, "get_unverified_chain", None) or getattr(
            getattr(self._tls, "_sslobj", None), "get_unverified_chain", None
        )
        first: Any = next(iter(chain() or ()), None) if chain else None
        return ssl.PEM_cert_to_DER_cert(first.public_bytes()) if hasattr(first, "public_bytes") else first

    @property
    def service(self) -> str | None:
        """Return what the client wants besides a link of neighbours, once the handshake is done."""
        return self._tls.selected_alpn_protocol()

    def read(self) -> list[bytes]:
        """Return the TLS records that one read of the socket completes; raise ConnectionError at the end of the stream."""
        if len(self._view) < READ_BYTES:
            self._view = memoryview(bytearray(READ_BYTES))
        if not self._receive():
            return []
        return self.records()

    def records(self) -> list[bytes]:
        """Return the records that are already here."""
        records = []
        try:
            while record := self._tls.read(RECORD_BYTES):
                records.append(record)
        except ssl.SSLWantReadError:
            return records
        raise ConnectionResetError("the peer ended the TLS session")

    def _receive(self) -> bool:
        """Move bytes from the socket to TLS; return whether there were any."""
        try:
            count = self.socket.recv_into(self._view)
        except BlockingIOError:
            return False
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        self.meter.received.socket += count
        self._incoming.write(self._view[:count])
        return True

    def write(self, pieces: Iterable[bytes | memoryview], now: float, frames: int = 0) -> None:
        """Encrypt bytes and hand them to the wire."""
        self._tls.write(b"".join(pieces))
        self._collect(now, frames)

    def _collect(self, now: float, frames: int) -> None:
        data = self._outgoing.read()
        if not data:
            return
        if self.wire is None or self.wire.plain:
            self._pending.append(memoryview(data))
        else:
            self.wire.admit(data, now, frames)

    def flush(self, now: float) -> bool:
        """Give the socket what has arrived at the wire's end; return whether it took all of it."""
        if self.wire is not None and not self.wire.plain:
            self._pending.extend(map(memoryview, self.wire.due(now)))
        while self._pending:
            data = self._pending[0]
            try:
                count = self.socket.send(data)
            except BlockingIOError:
                return False
            self.meter.sent.socket += count
            if count < len(data):
                self._pending[0] = data[count:]
                return False
            self._pending.popleft()
        return True

    def underway(self) -> tuple[int, bool]:
        """Return how many bytes have arrived, as far as TCP knows, and whether others are still on their way."""
        unsure = unacknowledged(self.socket)
        return self.meter.sent.socket - unsure, unsure > 0 or not self.idle

    @property
    def blocked(self) -> bool:
        """Tell whether the socket still has to take something."""
        return bool(self._pending)

    @property
    def idle(self) -> bool:
        """Tell whether nothing written here is still on its way to the socket."""
        return not self._pending and (self.wire is None or not self.wire.in_flight)

    def end_output(self) -> None:
        """Tell the peer that nothing more will come."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Break the TCP connection at once, as a fault would (RST instead of FIN)."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        if self.wire is not None:
            self.wire.cut()
        self._pending.clear()
        self.socket.close()
