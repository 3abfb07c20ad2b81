"""TCP with mutual TLS 1.3: the transport of addresses that are just `host:port`."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Mapping
from typing import cast

from thinwire.link.identity import Identity
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker
from thinwire.link.tcp.acceptor import TcpAcceptor
from thinwire.link.tcp.dial import Target
from thinwire.link.tcp.stream import TlsStream
from thinwire.link.transport import ByteStream
from thinwire.util.runtime import Runtime


class TcpTransport:
    """A selector, and a socket pair to wake whoever waits in it."""

    def __init__(self, identity: Identity, runtime: Runtime) -> None:
        self.identity, self.runtime = identity, runtime
        self.selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        for end in (self._bell, self._button):
            end.setblocking(False)
        self._ringing = False
        self.selector.register(self._bell, selectors.EVENT_READ, self._answer)
        self._watched: dict[TlsStream, int] = {}
        self._target: Target | None = None
        self._acceptor: TcpAcceptor | None = None

    def dial(self, peer: Worker, options: LinkOptions, service: str | None, *, resolve: bool) -> ByteStream:
        if self._target is None or self._target.peer != peer:
            self._target = Target(peer, self.identity, service)
        return self._target.call(options, resolve=resolve)

    def listen(self, address: str | tuple[str, int], options: LinkOptions, take: Callable[[ByteStream], None]) -> TcpAcceptor:
        try:
            self._acceptor = TcpAcceptor(self, address, options, take)
        except BaseException:
            self.close()
            raise
        return self._acceptor

    def wait(self, streams: Mapping[ByteStream, bool], seconds: float) -> list[ByteStream]:
        self._watch(cast(Mapping[TlsStream, bool], streams))
        ready = []
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self._bell:
                self._answer()
            else:
                ready.append(key.data)
        return ready

    def _watch(self, streams: Mapping[TlsStream, bool]) -> None:
        """Let the selector watch these and no others."""
        for stream in [stream for stream in self._watched if stream not in streams]:
            del self._watched[stream]
            with contextlib.suppress(KeyError, ValueError):  # one that is closed has left already
                self.selector.unregister(stream.socket)
        for stream, sending in streams.items():
            events = stream.events | (selectors.EVENT_WRITE if sending else 0)
            if stream not in self._watched:
                self.selector.register(stream.socket, events, stream)
            elif self._watched[stream] != events:
                self.selector.modify(stream.socket, events, stream)
            self._watched[stream] = events

    def wake(self) -> None:
        if not self._ringing:
            self._ringing = True
            with contextlib.suppress(OSError):
                self._button.send(b"x")

    def _answer(self) -> None:
        """Hear the bell; whoever waits looks at every queue after this, not before."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        self._ringing = False

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        for each in (self.selector, self._bell, self._button):
            each.close()
