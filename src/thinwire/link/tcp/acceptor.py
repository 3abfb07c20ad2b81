"""Streams that others begin: accept, TLS, and who has to go when too many come. One thread."""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from thinwire.link.identity import certificate_of
from thinwire.link.options import LinkOptions
from thinwire.link.peer import split_address
from thinwire.link.tcp.contexts import server_context
from thinwire.link.tcp.knock import knock
from thinwire.link.tcp.refusals import Refusals
from thinwire.link.tcp.room import Guest, Room
from thinwire.link.tcp.stream import TlsStream, tune

if TYPE_CHECKING:
    from thinwire.link.tcp.transport import TcpTransport
    from thinwire.link.transport import ByteStream

ACCEPTS = 64
"""Connections accepted before the handshakes under way are looked at."""
LOOK_SECONDS = 0.25
"""Time between two looks at who takes too long."""
DRAIN_SECONDS = 1.0
"""A refused client may read the alert for this long before the socket goes."""


class TcpAcceptor:
    """One listening socket and one thread, which waits in the transport's selector."""

    def __init__(
        self, transport: TcpTransport, address: str | tuple[str, int], options: LinkOptions, take: Callable[[ByteStream], None]
    ) -> None:
        """Bind the address as given, `host:port` or a pair (port 0: any), and no other; nobody is admitted yet."""
        host, port = split_address(address) if isinstance(address, str) else address
        self._transport, self._options, self._take, self._now = transport, options, take, transport.runtime.now
        self._admitted: frozenset[bytes] = frozenset()
        self._room = Room()
        self._serving: Guest | None = None
        """Whose handshake is gone on with."""
        self._log = Refusals(self._now)
        self.refusals = self._log.latest
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        shared = options.held and hasattr(socket, "SO_REUSEPORT")
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=256, reuse_port=shared)
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose an address of this machine and a free port"
            ) from error
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._selector = transport.selector
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        self._closed = False
        self._thread: threading.Thread | None = None

    def admit(self, certificates: Iterable[str]) -> None:
        """Trust these from now on and nobody else; with the first call others can connect."""
        identity, trusted = self._transport.identity, set(certificates)
        self._knocks = {knock(identity, certificate, calling=False) for certificate in trusted}
        context = server_context(identity, trusted)
        context.sni_callback = self._knocked
        self._admitted, self._context = frozenset(map(certificate_of, trusted)), context
        if self._thread is None:
            self._thread = self._transport.runtime.thread("thinwire-listener", self._run)
            self._thread.start()

    def close(self) -> None:
        """Stop listening, and end the thread."""
        self._closed = True
        self._transport.wake()
        if self._thread is None:
            self._socket.close()
        else:
            self._thread.join()

    def _run(self) -> None:
        looked_at = 0.0
        try:
            while not self._closed:
                for key, _ in self._selector.select(LOOK_SECONDS if self._room else None):
                    key.data()
                now = self._now()
                if now >= looked_at + LOOK_SECONDS:
                    looked_at = now
                    self._end_overdue(now)
        finally:
            for guest in self._room:
                self._dismiss(guest)
            self._socket.close()

    def _end_overdue(self, now: float) -> None:
        for guest in self._room:
            if now >= guest.deadline:
                if not guest.refused:
                    self._note(guest, f"no TLS handshake within {self._options.establish_seconds} s")
                self._dismiss(guest)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and (spared := self._room.least()) is not None:
                    self._crowd_out(spared)
                return  # nobody else waits, the client has left again, or there are no file descriptors: the next one is tried
            sock.setblocking(False)
            guest = Guest(sock, address[0], f"{address[0]}:{address[1]}", self._now() + self._options.establish_seconds)
            self._selector.register(sock, selectors.EVENT_READ, partial(self._serve, guest))
            if (crowded_out := self._room.enter(guest)) is not None:
                self._crowd_out(crowded_out)

    def _crowd_out(self, guest: Guest) -> None:
        """Make room: strangers must not keep the peer out."""
        if not guest.refused:
            self._note(guest, "not done with its handshake when too many others came")
        self._dismiss(guest)

    def _knocked(self, tls: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int | None:
        """Look at the name in a handshake's first bytes: strangers are refused before a key is used, if there are many."""
        assert self._serving is not None
        self._serving.member = name in self._knocks
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME if self._room.crowded and not self._serving.member else None

    def _begin(self, guest: Guest) -> TlsStream:
        """Begin the handshake of a guest whose first bytes have come, and make room once these have shown who it may be."""
        self._room.spoke(guest)
        guest.stream = TlsStream(guest.socket, self._context, server_side=True, congestion=tune(guest.socket, self._options))
        try:
            guest.stream.ready()  # not done yet: the client still has to show its certificate
        finally:
            if (crowded_out := self._room.excess()) is not None:
                self._crowd_out(crowded_out)
        return guest.stream

    def _serve(self, guest: Guest) -> None:
        """Go on with one handshake."""
        if guest not in self._room:
            return  # crowded out by one that came in the same moment
        self._serving = guest
        try:
            if guest.refused:
                while guest.socket.recv(2**16):
                    pass
                raise ConnectionResetError
            stream = guest.stream or self._begin(guest)
            if guest in self._room and stream.ready():
                self._hand_over(guest, stream)
        except BlockingIOError:
            pass
        except OSError as error:
            if guest in self._room:
                self._refuse(guest, error)

    def _refuse(self, guest: Guest, error: OSError) -> None:
        """End a handshake that went wrong."""
        reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else getattr(error, "reason", None) or str(error)
        if not guest.refused:
            # a client that just leaves (a scanner, a second connection no longer needed) is nothing to warn about
            self._note(guest, reason, logging.WARNING if isinstance(error, ssl.SSLError) else logging.DEBUG)
        if isinstance(error, ssl.SSLError) and not guest.refused and guest.stream is not None:
            # closing with unread bytes would send a reset that overtakes the alert
            guest.refused = True
            guest.deadline = self._now() + DRAIN_SECONDS
            guest.stream.end("output")
        else:
            self._dismiss(guest)

    def _hand_over(self, guest: Guest, stream: TlsStream) -> None:
        self._leave(guest)
        if stream.peer in self._admitted:
            self._take(stream)
        else:
            self._note(guest, "its certificate is not in the roster")
            stream.end("close")

    def _note(self, guest: Guest, reason: str, level: int = logging.WARNING) -> None:
        self._log.note(guest.host, guest.name, reason, level)

    def _leave(self, guest: Guest) -> None:
        self._room.leave(guest)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.socket)

    def _dismiss(self, guest: Guest) -> None:
        self._leave(guest)
        guest.socket.close()
