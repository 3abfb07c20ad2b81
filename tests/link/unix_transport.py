"""A transport of another package: TLS over a socket of the file system, `unix:///run/attic.sock`, for workers of one machine.

What a transport has to do itself: begin a stream, accept one, wait for several. TLS and the proof of who the peer is are thinwire's.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections import deque

from thinwire.link.identity import certificate_of
from thinwire.link.problem import Problem, Unreached
from thinwire.link.tcp.contexts import client_context, server_context
from thinwire.link.tcp.stream import TlsStream


def path_of(address: str) -> str:
    return address.removeprefix("unix://")


class Dialled(TlsStream):
    """A stream that this end begins."""

    def __init__(self, identity, peer, service):
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(path_of(peer.address))
        except OSError as error:
            sock.close()
            raise Unreached(Problem(f"{peer.address}: {error.strerror}")) from error
        super().__init__(sock, client_context(identity, peer.certificate, service), server_side=False, congestion="none")
        self.expected = certificate_of(peer.certificate)

    def ready(self):
        try:
            done = super().ready()
        except OSError as error:
            raise Unreached(Problem(str(error))) from error
        if done and self.peer != self.expected:
            raise Unreached(Problem("another certificate", patience=False))
        return done


class Acceptor:
    """A listening socket, and a thread that goes on with the handshakes."""

    def __init__(self, transport, address, take):
        self.transport, self.take, self.path = transport, take, path_of(address)
        self.address, self.refusals, self.admitted = (self.path, 0), deque(maxlen=10), frozenset()
        self.context = self.thread = None
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)  # of a worker that is gone
            self.socket.bind(self.path)
        except OSError as error:
            self.socket.close()
            raise ValueError(f"cannot listen at {self.path}: {error.strerror}; choose a path in a folder of yours") from error
        self.socket.setblocking(False)

    def admit(self, certificates):
        certificates = set(certificates)
        self.context, self.admitted = server_context(self.transport.identity, certificates), frozenset(map(certificate_of, certificates))
        if self.thread is None:
            self.socket.listen()
            self.thread = self.transport.runtime.thread("unix-listener", self.run)
            self.thread.start()

    def run(self):
        under_way: list[TlsStream] = []
        while not self.transport.closed:
            for each in self.transport.wait(dict.fromkeys([self, *under_way], False), 60.0):
                if each is self:
                    sock = self.socket.accept()[0]
                    sock.setblocking(False)
                    under_way.append(TlsStream(sock, self.context, server_side=True, congestion="none"))
                elif self.settled(each):
                    under_way.remove(each)
        for each in (self, *under_way):
            each.socket.close()

    def settled(self, stream):
        """Go on with a handshake; tell whether it is over, one way or the other."""
        try:
            if not stream.ready():
                return False
            if stream.peer in self.admitted:
                self.take(stream)
                return True
            self.refusals.append("its certificate is not in the roster")
        except OSError as error:
            self.refusals.append(str(error))
        stream.end("close")
        return True


class UnixTransport:
    """Made for one thread, which waits in it, or for one acceptor."""

    def __init__(self, identity, runtime):
        self.identity, self.runtime, self.closed, self.acceptor = identity, runtime, False, None
        self.bell, self.button = socket.socketpair()

    def dial(self, peer, options, service, *, resolve):
        stream = Dialled(self.identity, peer, service)
        stream.ready()  # says the first word of the handshake; `wait` is for what comes back
        return stream

    def listen(self, address, options, take):
        self.acceptor = Acceptor(self, address, take)
        return self.acceptor

    def wait(self, streams, seconds):
        with selectors.DefaultSelector() as selector:
            selector.register(self.bell, selectors.EVENT_READ)
            for stream, sending in streams.items():
                selector.register(stream.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if sending else 0), stream)
            found = [key.data for key, _ in selector.select(seconds)]
        if None in found:
            self.bell.recv(4096)
        return [stream for stream in found if stream is not None]

    def wake(self):
        with contextlib.suppress(OSError):
            self.button.send(b"x")

    def close(self):
        self.closed = True
        if self.acceptor is not None and self.acceptor.thread is not None:
            self.wake()
            self.acceptor.thread.join()
        self.bell.close()
        self.button.close()
