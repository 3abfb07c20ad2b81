"""Streams that this end begins: resolve, connect, TLS, and the peer's certificate compared with the roster's."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl

from thinwire.link.identity import Identity, certificate_of, fingerprint
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker, split_address
from thinwire.link.problem import Unreached
from thinwire.link.tcp.contexts import client_context
from thinwire.link.tcp.knock import knock
from thinwire.link.tcp.stream import TlsStream, tune
from thinwire.link.tcp.words import hung_up, no_answer, no_handshake, no_tls, not_connected, wrong_certificate


class Target:
    """Whom to call: the address, once it was looked up, and the only certificate that will do."""

    def __init__(self, peer: Worker, identity: Identity, service: str | None) -> None:
        assert peer.address is not None
        self.peer, self.address = peer, peer.address
        self.context = client_context(identity, peer.certificate, service)
        self.certificate = certificate_of(peer.certificate)
        self.name = knock(identity, peer.certificate, calling=True)
        self._found: tuple[int, int, int, str, tuple[object, ...]] | None = None

    def call(self, options: LinkOptions, *, resolve: bool) -> DialledStream:
        """Begin a connection; while another one serves, a slow resolver must not stall it."""
        sock = None
        try:
            if resolve or self._found is None:  # a home address may have changed since
                self._found = socket.getaddrinfo(*split_address(self.address), type=socket.SOCK_STREAM)[0]
            family, kind, protocol, _, address = self._found
            sock = socket.socket(family, kind, protocol)
            stream = DialledStream(sock, self, tune(sock, options))
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
        except (OSError, UnicodeError) as error:  # a name that cannot be looked up
            if sock is not None:
                sock.close()
            raise Unreached(not_connected(self.address, error)) from None
        return stream


class DialledStream(TlsStream):
    """A stream that this end begins."""

    events = selectors.EVENT_WRITE

    def __init__(self, sock: socket.socket, target: Target, congestion: str) -> None:
        super().__init__(sock, target.context, server_side=False, congestion=congestion, name=target.name)
        self._target = target
        self.problem = no_answer(target.address)

    def ready(self) -> bool:
        """Go on with TCP, then with TLS; raise Unreached with what to do about it."""
        address = self._target.address
        if self.events == selectors.EVENT_WRITE:
            if code := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise Unreached(not_connected(address, OSError(code, os.strerror(code))))
            self.events, self.problem = selectors.EVENT_READ, no_handshake(address)
        try:
            done = super().ready()
        except ssl.SSLCertVerificationError as error:
            raise self._wrong(error.verify_message) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise Unreached(hung_up(address, error)) from None
        except ssl.SSLError as error:
            raise Unreached(no_tls(address, error)) from None
        except OSError as error:
            raise Unreached(hung_up(address, error)) from None
        if done and self.peer != self._target.certificate:
            raise self._wrong("another certificate")
        return done

    def _wrong(self, reason: str) -> Unreached:
        peer = self._target.peer
        return Unreached(wrong_certificate(peer.id, self._target.address, fingerprint(peer.certificate), self.shown_certificate(), reason))
