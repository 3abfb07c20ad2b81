"""One TLS session over a non-blocking socket, without a thread.

SSLObject and MemoryBIO keep TLS apart from the socket: exact socket bytes, and room for an emulated line in between (`connection.py`).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import struct
import sys
from typing import Any, Literal

from thinwire.link.errors import Alert
from thinwire.link.options import LinkOptions
from thinwire.link.problem import NO_ATTEMPT, Problem

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


class TlsStream:
    """A TLS session on a connected socket; a client may call the server by a name."""

    events = selectors.EVENT_READ
    """What it waits for besides room for what is to be sent."""
    problem: Problem = NO_ATTEMPT

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, congestion: str = "unknown", name: str | None = None
    ) -> None:
        self.socket, self.congestion = sock, congestion
        self.peer = b""
        self.service: str | None = None
        self.exchanged = (0, 0)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=name)
        self._unsent = b""
        self._view = memoryview(bytearray(HANDSHAKE_BYTES))

    def ready(self) -> bool:
        """Go on with the handshake; return whether it is done. Raises ssl.SSLError with the reason, told to the peer too."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    if not (count := self._receive()):
                        return False
                    self.exchanged = (self.exchanged[0], self.exchanged[1] + count)
                else:
                    self.peer = self._tls.getpeercert(binary_form=True) or b""
                    self.service = self._tls.selected_alpn_protocol()
                    self._view = memoryview(bytearray(READ_BYTES))
                    return True
        finally:
            # an alert that cannot be sent must not hide the error it is about
            with contextlib.suppress(OSError):
                self._unsent += self._outgoing.read()
                if self._unsent:
                    count = self.send(memoryview(self._unsent))
                    self.exchanged, self._unsent = (self.exchanged[0] + count, self.exchanged[1]), self._unsent[count:]

    def shown_certificate(self) -> bytes | None:
        """Return the certificate (DER) that the peer showed, also if it was refused; None: it cannot be told."""
        # public from Python 3.13 on; before, the object beneath has it, and returns other objects
        chain = getattr(self._tls, "get_unverified_chain", None) or getattr(
            getattr(self._tls, "_sslobj", None), "get_unverified_chain", None
        )
        first: Any = next(iter(chain() or ()), None) if chain else None
        return ssl.PEM_cert_to_DER_cert(first.public_bytes()) if hasattr(first, "public_bytes") else first

    def read(self) -> tuple[int, list[bytes]]:
        """Return the bytes of one read of the socket, and the TLS records that are complete now."""
        try:
            try:
                count = self._receive()
            except ConnectionError:
                if records := self._records():  # what came before the end is read first
                    return 0, records
                raise
            return count, self._records()
        except ssl.SSLError as error:
            raise translated(error) from None

    def _records(self) -> list[bytes]:
        records = []
        try:
            while record := self._tls.read(RECORD_BYTES):
                records.append(record)
        except ssl.SSLWantReadError:
            return records
        raise ConnectionResetError("the peer ended the TLS session")

    def _receive(self) -> int:
        """Move bytes from the socket to TLS; return how many."""
        try:
            count = self.socket.recv_into(self._view)
        except BlockingIOError:
            return 0
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        self._incoming.write(self._view[:count])
        return count

    def seal(self, data: bytes) -> bytes:
        """Encrypt."""
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            raise translated(error) from None
        sealed, self._unsent = self._unsent + self._outgoing.read(), b""
        return sealed

    def send(self, data: memoryview) -> int:
        """Give the socket what it takes."""
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0

    def unacknowledged(self) -> int:
        """Ask TCP."""
        if fcntl is None:
            return 0
        count = bytearray(4)
        try:
            fcntl.ioctl(self.socket, termios.TIOCOUTQ, count)
        except (OSError, ValueError):  # it is closed
            return 0
        return int.from_bytes(count, sys.byteorder)

    def end(self, how: Literal["output", "close", "reset"]) -> None:
        """Shut down, close, or break the connection (RST instead of FIN)."""
        with contextlib.suppress(OSError):
            if how == "output":
                self.socket.shutdown(socket.SHUT_WR)
            elif how == "reset":
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how != "output":
            self.socket.close()


def translated(error: ssl.SSLError) -> OSError:
    """Return a failure in words that mean something without TLS: a peer finishes its handshake, and refuses, after this end has."""
    reason = str(error.reason or error)
    return Alert(reason.lower().replace("_", " ")) if "ALERT" in reason else ConnectionError(f"TLS: {reason}")
