"""Strangers at a real listener while the true peer is in its handshake: cause and order, no clock (bench/strangers.py has the times)."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator

import pytest

from link.support import LEFT, LOOPBACK, QUICK, RIGHT, terms
from patience import HANG, wait_until
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.identity import Identity
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.peer import Worker
from thinwire.link.tcp.contexts import client_context
from thinwire.link.tcp.knock import knock


@pytest.fixture
def listener(world) -> Iterator[Listener]:
    listener = Listener(LOOPBACK, Endpoint(world.identity("left")), [Worker(RIGHT, world.identity("right").certificate)], QUICK)
    yield listener
    listener.close()


class Peer:
    """The true peer, whose handshake the test takes step by step."""

    def __init__(self, world, listener: Listener) -> None:
        self.adopted: list[object] = []
        listener.expect(RIGHT, self.adopted.append)
        left = world.identity("left").certificate
        context = client_context(world.identity("right"), left)
        self.socket = socket.create_connection(listener.address, timeout=HANG)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=knock(world.identity("right"), left, calling=True))

    def say(self) -> bool:
        """Go on with the handshake as far as possible without the other end; return whether it is done."""
        done = True
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            done = False
        self.socket.sendall(self.outgoing.read())
        return done

    def finish(self) -> None:
        while not self.say():
            data = self.socket.recv(2**16)
            assert data, "the listener has hung up"
            self.incoming.write(data)


def crowd(listener: Listener, stack: contextlib.ExitStack, count: int, opening: bytes = b"") -> None:
    """Connect many strangers, each of whom says `opening` and holds on; return when the listener has taken them all in."""
    for _ in range(count):
        sock = stack.enter_context(socket.create_connection(listener.address, timeout=HANG))
        sock.sendall(opening)
    with socket.create_connection(listener.address, timeout=HANG) as last:
        last.sendall(b"GET / HTTP/1.1\r\n\r\n")
        last.recv(100)  # it came behind the others and has its answer


def stranger_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("kind", ["idle", "talking"])
def test_a_crowd_does_not_push_the_peer_out_of_its_handshake(world, listener, kind):
    peer = Peer(world, listener)
    assert not peer.say()
    wait_until(lambda: peer.socket.recv(1, socket.MSG_PEEK))  # the listener has answered the first bytes
    with contextlib.ExitStack() as strangers:
        crowd(listener, strangers, 300, b"" if kind == "idle" else stranger_hello())
        peer.finish()
        wait_until(lambda: peer.adopted)
    peer.socket.close()
    peer.adopted[0].end("close")


@pytest.mark.parametrize("kind", ["idle", "talking"])
def test_the_peer_gets_in_while_a_crowd_holds_on(world, listener, kind):
    with contextlib.ExitStack() as strangers:
        crowd(listener, strangers, 300, b"" if kind == "idle" else stranger_hello())
        left = Link.listen(listener, Worker(RIGHT, world.identity("right").certificate), terms(LEFT), Contract(), options=QUICK)
        host, port = listener.address
        target = Worker(LEFT, world.identity("left").certificate, f"{host}:{port}")
        right = Link.connect(target, Endpoint(world.identity("right")), terms(RIGHT), Contract(), options=QUICK)
        right.wait_open(HANG)
        left.wait_open(HANG)
    for link in (right, left):
        link.close()


def test_a_member_is_known_by_its_knock_alone_to_members(world):
    left, right, stranger = (world.identity(name) for name in ("left", "right", "stranger"))
    word = knock(right, left.certificate, calling=True)
    assert word == knock(left, right.certificate, calling=False), "both ends make it"
    assert word != knock(left, right.certificate, calling=True), "it says who calls whom"
    assert word.isalnum() and len(word) < 63
    forged = Identity(stranger.key_path, stranger.certificate_path, right.certificate)
    assert word != knock(forged, left.certificate, calling=True), "certificates alone, which a server shows to anyone, do not make it"
