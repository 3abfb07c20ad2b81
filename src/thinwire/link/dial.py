"""Make outgoing connections for a link: resolve, connect, TLS, with back-off and jitter. Lives in the link's I/O thread."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import ssl
from collections.abc import Callable
from typing import Any

from thinwire.link.connection import Connection, tune
from thinwire.link.errors import LinkError
from thinwire.link.options import LinkOptions
from thinwire.link.roster import Worker
from thinwire.link.tls import Identity, certificate_of, client_context, fingerprint


class Dialer:
    """At most one attempt at a time; `ready` gets the connection whose handshake is done."""

    def __init__(self, peer: Worker, identity: Identity, options: LinkOptions, service: str | None = None) -> None:
        self._peer = peer
        self._options = options
        self._context = client_context(identity, peer.certificate, service)
        self._der = certificate_of(peer.certificate)
        self._target: tuple[Any, ...] | None = None
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._congestion = "unknown"
        self._deadline = 0.0
        self._retry_at = float("-inf")
        self._failures = 0
        self.problem = "no attempt yet"
        """Why the last attempt failed."""

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
                self.failed(f"no TLS handshake within {self._options.establish_seconds} s", now, selector)
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
        except OSError as error:
            self.failed(f"{self._peer.address}: {error.strerror or error}", now, selector)

    def progress(self, now: float, selector: selectors.BaseSelector, callback: Callable[[], None], *, patient: bool) -> Connection | None:
        """Go on after a socket event; return a finished connection. A refusal raises LinkError, unless `patient` and it may be noise."""
        assert self._socket is not None
        try:
            if self._connection is None:
                if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, "connecting failed")
                self._connection = Connection(self._socket, self._context, server_side=False, congestion=self._congestion)
                selector.modify(self._socket, selectors.EVENT_READ, callback)
            if not self._connection.handshake():
                return None
        except ssl.SSLCertVerificationError as error:
            expected = fingerprint(self._peer.certificate)
            raise LinkError(
                f"the certificate shown at {self._peer.address} is not that of {self._peer.place} in the roster ({error.verify_message}); "
                f"expected {expected}: compare fingerprints and update the roster"
            ) from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError) as error:
            self.failed(f"{self._peer.address}: {error.strerror or error}", now, selector)
            return None
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not patient:
                raise LinkError(f"no TLS 1.3 with {self._peer.place} at {self._peer.address}: {error.reason or error}") from error
            self.failed(f"{self._peer.address}: {error.strerror or error}", now, selector)
            return None
        if self._connection.peer_certificate() != self._der:
            raise LinkError(f"the certificate at {self._peer.address} is not the one of {self._peer.place} in the roster")
        connection, self._connection = self._connection, None
        selector.unregister(self._socket)
        self._socket = None
        return connection

    def failed(self, problem: str, now: float, selector: selectors.BaseSelector) -> None:
        """End the attempt and wait before the next one."""
        self.problem = problem
        self.cancel(selector)
        self.back_off(now)

    def back_off(self, now: float) -> None:
        """Pause before the next attempt."""
        pause = min(self._options.backoff_limit_seconds, self._options.backoff_seconds * 2 ** min(self._failures, 16))
        self._failures += 1
        self._retry_at = now + pause * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        """Forget earlier failures."""
        self._failures = 0

    def cancel(self, selector: selectors.BaseSelector) -> None:
        """Drop an attempt that is under way."""
        if self._socket is not None:
            with contextlib.suppress(KeyError):
                selector.unregister(self._socket)
            self._socket.close()
        self._socket = self._connection = None
