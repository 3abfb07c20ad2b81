"""Two ends of a link in one process, and a TCP proxy between them that counts, freezes and cuts."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from patience import HANG, wait_until
from thinwire.config.profiles import OPEN, LinkProfile
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.hello import Terms
from thinwire.link.identity import Identity, make_identity
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker, WorkerId

LEFT, RIGHT = WorkerId(0, 0), WorkerId(0, 1)
QUICK = LinkOptions(close_seconds=HANG, abort_seconds=HANG, establish_seconds=HANG, reconnect_seconds=HANG)
"""A link that never gives up for lack of time, whatever else the machine does."""
STEADY = replace(QUICK, ping_seconds=HANG, pong_grace_seconds=HANG, silent_seconds=2 * HANG)
"""Likewise, and one that has no doubts: it stays on one connection unless that breaks."""
LOOPBACK = ("127.0.0.1", 0)
__all__ = ["LEFT", "LOOPBACK", "QUICK", "RIGHT", "STEADY", "Proxy", "World", "hurry", "pair", "stop", "terms", "wait_until"]


@dataclass
class World:
    """Identities by name, made when first asked for."""

    folder: Path
    made: dict[str, Identity] = field(default_factory=dict)

    def identity(self, name: str, **options) -> Identity:
        if name not in self.made:
            self.made[name] = make_identity(self.folder / name, name, **options)
        return self.made[name]


def terms(worker_id: WorkerId, **changes) -> Terms:
    values = {"run": "test", "config": {"model.width": 64, "codec.name": "dense"}, "worker_id": worker_id, **changes}
    return Terms(**values)


@contextlib.contextmanager
def pair(
    world: World,
    contract: Contract | None = None,
    *,
    options: LinkOptions = QUICK,
    profile: LinkProfile = OPEN,
    right_contract: Contract | None = None,
    left_terms: Terms | None = None,
    right_terms: Terms | None = None,
    proxy: bool = False,
    frozen: bool = False,
) -> Iterator[tuple[Link, Link, Proxy]]:
    """Yield (left, right, proxy): left listens, right dials, through a proxy if wanted, which may be frozen from the start.

    Checks that nothing is left behind.
    """
    contract = contract or Contract()
    left_id, right_id = world.identity("left"), world.identity("right")
    threads = set(threading.enumerate())
    listener = Listener(LOOPBACK, Endpoint(left_id), [Worker(RIGHT, right_id.certificate)], options)
    between = Proxy(listener.address) if proxy or frozen else None
    if between and frozen:
        between.frozen.set()
    host, port = between.address if between else listener.address
    left = Link.listen(listener, Worker(RIGHT, right_id.certificate), left_terms or terms(LEFT), contract, options=options, profile=profile)
    right = Link.connect(
        Worker(LEFT, left_id.certificate, f"{host}:{port}"),
        Endpoint(right_id),
        right_terms or terms(RIGHT),
        right_contract or contract.mirrored(),
        options=options,
        profile=profile,
    )
    try:
        yield left, right, between  # type: ignore[misc]
    finally:
        closers = [threading.Thread(target=link.close) for link in (left, right)]
        for link in (left, right):
            link.options = replace(link.options, close_seconds=min(1.0, link.options.close_seconds))  # after the test nothing matters
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        if between:
            between.close()
        listener.close()
        assert set(threading.enumerate()) <= threads


def hurry(*links: Link, **limits: float) -> None:
    """Change the limits of links that are open: those that a test wants to see pass must not hit the opening."""
    for link in links:
        session = link._session
        session.options = session.heartbeat._options = replace(session.options, **limits)
        if session.dialer is not None:
            session.dialer._options = session.options


def stop(link: Link) -> None:
    """End a link whose peer will not answer, without waiting for it."""
    link._loop.call(link._session.stop)
    link.close()


class Proxy:
    """Forward TCP connections to an address; count the bytes; on demand lose them, or take none (connections stay up and silent)."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(LOOPBACK)
        self.address = self._server.getsockname()
        self.up = self.down = self.connections = 0
        self.lost = 0
        """So many connections, the first ones, lose every byte."""
        self.frozen, self.flowing = threading.Event(), threading.Event()
        self.flowing.set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self.connections += 1
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, sink, name in ((client, server, "up"), (server, client, "down")):
                    thread = threading.Thread(target=self._forward, args=(source, sink, name, self.connections), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, name: str, number: int) -> None:
        try:
            while self.flowing.wait() and (data := source.recv(2**16)):
                if self.frozen.is_set() or number <= self.lost:
                    continue
                setattr(self, name, getattr(self, name) + len(data))
                sink.sendall(data)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Break every connection."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.flowing.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
