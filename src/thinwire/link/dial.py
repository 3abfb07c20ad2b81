"""Make outgoing connections for a link: resolve, connect, TLS, with back-off and jitter. Lives in the link's I/O thread."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import selectors
import socket
import ssl
from collections.abc import Callable
from typing import Any

from thinwire.link.connection import Connection, tune
from thinwire.link.identity import Identity, certificate_of, fingerprint
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker
from thinwire.link.problem import (
    NO_ATTEMPT,
    Problem,
    hung_up,
    no_answer,
    no_handshake,
    no_tls,
    not_connected,
    wrong_certificate,
)
from thinwire.link.tcp.contexts import client_context
from thinwire.link.tcp.knock import knock

LOG = logging.getLogger("thinwire.link")


class Dialer:
    """At most one attempt at a time. Whatever answers, it goes on trying: who is at an address now need not be there in a minute."""

    def __init__(self, peer: Worker, identity: Identity, options: LinkOptions, service: str | None = None) -> None:
        self._peer = peer
        self._options = options
        self._context = client_context(identity, peer.certificate, service)
        self._der = certificate_of(peer.certificate)
        self._name = knock(identity, peer.certificate, calling=True)
        self.fingerprint = identity.fingerprint
        """Of this worker's own certificate, which the peer's roster must hold."""
        self._target: tuple[Any, ...] | None = None
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._congestion = "unknown"
        self._deadline = 0.0
        self._retry_at = float("-inf")
        self._failures = 0
        self._problem = NO_ATTEMPT
        self._told = ""

    @property
    def problem(self) -> Problem:
        """Return why the last attempt failed, or how far the first one has come."""
        if self._problem is not NO_ATTEMPT or not self.busy:
            return self._problem
        return no_answer(self._address) if self._connection is None else no_handshake(self._address)

    @property
    def busy(self) -> bool:
        return self._socket is not None

    @property
    def next_at(self) -> float:
        """Return when `tend` has something to do, if a connection is wanted."""
        return self._deadline if self.busy else self._retry_at

    def tend(self, now: float, selector: selectors.BaseSelector, callback: Callable[[], None], *, resolve: bool) -> None:
        """Start an attempt when its time has come; end one that takes too long."""
        if self.busy:
            if now >= self._deadline:
                tell = no_answer if self._connection is None else no_handshake
                self.failed(tell(self._address, self._options.establish_seconds), now, selector)
        elif now >= self._retry_at:
            self._start(now, selector, callback, resolve)

    def _start(self, now: float, selector: selectors.BaseSelector, callback: Callable[[], None], resolve: bool) -> None:
        try:
            if resolve or self._target is None:
                # a home address may have changed since; while another connection serves, a slow resolver must not stall it
                host, port = self._peer.host_and_port
                self._target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            family, kind, protocol, _, address = self._target
            self._socket = socket.socket(family, kind, protocol)
            self._congestion = tune(self._socket, self._options)
            self._deadline = now + self._options.establish_seconds
            selector.register(self._socket, selectors.EVENT_WRITE, callback)
            with contextlib.suppress(BlockingIOError):
                self._socket.connect(address)
        except (OSError, UnicodeError) as error:  # a name that cannot be looked up
            self.failed(not_connected(self._address, error), now, selector)

    def progress(self, now: float, selector: selectors.BaseSelector, callback: Callable[[], None]) -> Connection | None:
        """Go on after a socket event; return a finished connection."""
        assert self._socket is not None
        if self._connection is None:
            if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.failed(not_connected(self._address, OSError(code, os.strerror(code))), now, selector)
                return None
            self._connection = Connection(self._socket, self._context, server_side=False, congestion=self._congestion, name=self._name)
            selector.modify(self._socket, selectors.EVENT_READ, callback)
        try:
            if not self._connection.handshake():
                return None
        except OSError as error:
            self.failed(self._explain(error, self._connection), now, selector)
            return None
        if self._connection.peer_certificate() != self._der:
            self.failed(self._wrong(self._connection, "another certificate"), now, selector)
            return None
        connection, self._connection = self._connection, None
        selector.unregister(self._socket)
        self._socket = None
        return connection

    @property
    def _address(self) -> str:
        assert self._peer.address is not None
        return self._peer.address

    def _explain(self, error: OSError, connection: Connection) -> Problem:
        """Tell why a handshake failed."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return self._wrong(connection, error.verify_message)
        if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return no_tls(self._address, error)
        return hung_up(self._address, error)

    def _wrong(self, connection: Connection, reason: str) -> Problem:
        expected = fingerprint(self._peer.certificate)
        return wrong_certificate(self._peer.id, self._address, expected, connection.shown_certificate(), reason)

    def failed(self, problem: Problem, now: float, selector: selectors.BaseSelector) -> None:
        """End the attempt and wait before the next one."""
        self._problem = problem
        if not problem.patience and problem.text != self._told:  # waiting alone will hardly help, so somebody should know at once
            self._told = problem.text
            LOG.warning("%s; trying again", problem)
        self.cancel(selector)
        self.back_off(now)

    def back_off(self, now: float, problem: Problem | None = None) -> None:
        """Pause before the next attempt; a connection that was made may have had a problem."""
        self._problem = problem or self._problem
        pause = min(self._options.backoff_limit_seconds, self._options.backoff_seconds * 2 ** min(self._failures, 16))
        self._failures += 1
        self._retry_at = now + pause * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        """Forget earlier failures."""
        self._failures, self._told = 0, ""

    def cancel(self, selector: selectors.BaseSelector) -> None:
        """Drop an attempt that is under way."""
        if self._socket is not None:
            with contextlib.suppress(KeyError):
                selector.unregister(self._socket)
            self._socket.close()
        self._socket = self._connection = None
