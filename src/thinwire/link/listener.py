"""Accept connections on one address for all links of a worker, and hand each to the link its certificate belongs to.

Only the TLS handshake happens here. A client that is not in `peers` is refused with the reason, in the log and in `refusals`; one that
is, but whose link is not open yet, is turned away and tries again. A client that asks for a service, such as that of a standby, goes to
whoever provides it, and never to a link.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from thinwire.link.connection import Connection, tune
from thinwire.link.identity import Identity, certificate_of
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker, WorkerId, split_address
from thinwire.link.tcp.contexts import server_context
from thinwire.link.tcp.knock import knock
from thinwire.link.tcp.refusals import Refusals
from thinwire.link.tcp.room import Guest, Room

ACCEPTS = 64
"""Connections accepted before the handshakes under way are looked at."""
LOOK_SECONDS = 0.25
"""Time between two looks at who takes too long."""
DRAIN_SECONDS = 1.0
"""A refused client may read the alert for this long before the socket goes."""


class Listener:
    """One listening socket and one thread."""

    def __init__(
        self,
        address: str | tuple[str, int],
        identity: Identity,
        peers: Iterable[Worker],
        options: LinkOptions | None = None,
        others: Iterable[Worker] = (),
        *,
        held: bool = False,
    ) -> None:
        """Bind the address as given, `host:port` or a pair (port 0: any), and no other; `held`: a supervisor keeps the port for us."""
        host, port = split_address(address) if isinstance(address, str) else address
        self._options = options or LinkOptions()
        self._identity = identity
        self.admit(peers, others)
        self.services: dict[str, Callable[[WorkerId, Connection], None]] = {}
        """Who takes the connections for each service; called by the listener's thread, with who asks."""
        self._adopters: dict[WorkerId, Callable[[Connection], None]] = {}
        self._room = Room()
        self._serving: Guest | None = None
        """Whose handshake is gone on with."""
        self._log = Refusals()
        self.refusals = self._log.latest
        """The latest refusals: who and why."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=256, reuse_port=held)
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose an address of this machine and a free port"
            ) from error
        self._socket.setblocking(False)
        self._awake, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        self._selector.register(self._awake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="thinwire-listener", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port, the real port if 0 was asked for."""
        return self._socket.getsockname()[:2]

    def admit(self, peers: Iterable[Worker], others: Iterable[Worker] = ()) -> None:
        """Trust these from now on and nobody else: `peers` for links, `others` for services; they are turned away until then."""
        peers, others = tuple(peers), tuple(others)
        self._places = {certificate_of(peer.certificate): peer.id for peer in peers}
        self._clients = {certificate_of(worker.certificate): worker.id for worker in (*peers, *others)}
        certificates = {worker.certificate for worker in (*peers, *others)}
        self._knocks = {knock(self._identity, certificate, calling=False) for certificate in certificates}
        context = server_context(self._identity, certificates)
        context.sni_callback = self._knocked
        self._context = context

    def expect(self, worker_id: WorkerId, adopt: Callable[[Connection], None]) -> None:
        """Hand connections of a place to `adopt` from now on."""
        self.check_free(worker_id)
        self._adopters[worker_id] = adopt

    def check_free(self, worker_id: WorkerId) -> None:
        """Refuse a place that is not known or already has a link."""
        if worker_id not in self._places.values():
            raise ValueError(f"this listener was not given the certificate of {worker_id}; name it among the peers")
        if worker_id in self._adopters:
            raise ValueError(f"a link from {worker_id} is already expected here; close it first")

    def forget(self, worker_id: WorkerId) -> None:
        """Stop handing connections of a place on."""
        self._adopters.pop(worker_id, None)

    def close(self) -> None:
        """Stop listening; links that have their connection keep it."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        looked_at = 0.0
        try:
            while True:
                for key, _ in self._selector.select(LOOK_SECONDS if self._room else None):
                    if key.data is None:
                        return
                    key.data()
                now = time.monotonic()
                if now >= looked_at + LOOK_SECONDS:
                    looked_at = now
                    self._end_overdue(now)
        finally:
            for guest in self._room:
                self._dismiss(guest)
            for item in (self._selector, self._socket, self._awake, self._wake):
                item.close()

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
            guest = Guest(sock, address[0], f"{address[0]}:{address[1]}", time.monotonic() + self._options.establish_seconds)
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

    def _begin(self, guest: Guest) -> Connection:
        """Begin the handshake of a guest whose first bytes have come, and make room once these have shown who it may be."""
        self._room.spoke(guest)
        guest.connection = Connection(guest.socket, self._context, server_side=True, congestion=tune(guest.socket, self._options))
        try:
            guest.connection.handshake()  # not done yet: the client still has to show its certificate
        finally:
            if (crowded_out := self._room.excess()) is not None:
                self._crowd_out(crowded_out)
        return guest.connection

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
            connection = guest.connection or self._begin(guest)
            if guest in self._room and connection.handshake():
                self._route(guest, connection)
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
        if isinstance(error, ssl.SSLError) and not guest.refused and guest.connection is not None:
            # closing with unread bytes would send a reset that overtakes the alert
            guest.refused = True
            guest.deadline = time.monotonic() + DRAIN_SECONDS
            guest.connection.end_output()
        else:
            self._dismiss(guest)

    def _route(self, guest: Guest, connection: Connection) -> None:
        """Hand a finished connection to its link, or to the service it asks for."""
        certificate = connection.peer_certificate()
        self._leave(guest)
        adopt = self._adopter(certificate, connection.service)
        if adopt is None:
            if certificate not in self._clients:
                self._note(guest, "its certificate is not in the roster")
            connection.close()
        else:
            adopt(connection)

    def _adopter(self, certificate: bytes, service: str | None) -> Callable[[Connection], None] | None:
        """Tell who takes the connection of a client now; None: nobody."""
        if service is None:
            worker_id = self._places.get(certificate)
            return None if worker_id is None else self._adopters.get(worker_id)
        serve, client = self.services.get(service), self._clients.get(certificate)
        return None if serve is None or client is None else partial(serve, client)

    def _note(self, guest: Guest, reason: str, level: int = logging.WARNING) -> None:
        self._log.note(guest.host, guest.name, reason, level)

    def _leave(self, guest: Guest) -> None:
        self._room.leave(guest)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.socket)

    def _dismiss(self, guest: Guest) -> None:
        self._leave(guest)
        guest.socket.close()
