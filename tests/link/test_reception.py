"""A connection that comes while another is in use, or after the peer was lost: judged first, and nothing good is given up for it."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from unittest import mock

import pytest

from link.support import LEFT, QUICK, RIGHT, Proxy, pair, terms
from patience import HANG, wait_until
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import Interrupted, LinkError
from thinwire.link.frame import Channel, Frame, Kind, encode
from thinwire.link.hello import make_hello
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker
from thinwire.link.reception import Reception
from thinwire.link.tcp.contexts import client_context

SKEWED = {"model.width": 128, "codec.name": "dense"}
SECOND = {
    "other settings": {"config": SKEWED, "incarnation": 9},
    "another run": {"run": "another", "incarnation": 9},
    "an older process": {"incarnation": 1},
}


def second_process(world, address: tuple[str, int], **changes) -> Link:
    """Start the right worker once more, with its own key."""
    host, port = address
    target = Worker(LEFT, world.identity("left").certificate, f"{host}:{port}")
    return Link.connect(target, Endpoint(world.identity("right")), terms(RIGHT, **changes), Contract(), options=QUICK)


@contextlib.contextmanager
def open_pair(world, **more) -> Iterator[tuple[Link, Link, Proxy]]:
    with pair(world, right_terms=terms(RIGHT, incarnation=5), proxy=True, **more) as (left, right, proxy):
        left.wait_open(HANG)
        right.wait_open(HANG)
        yield left, right, proxy


def both_ways(left: Link, right: Link, word: bytes) -> None:
    for sender, receiver in ((left, right), (right, left)):
        sender.send(Frame.make(Kind.STEP, word), HANG)
        assert receiver.receive(Channel.CONTROL, HANG).payload == word


@pytest.mark.parametrize("kind", SECOND)
def test_a_second_process_that_does_not_fit_leaves_the_good_connection_alone(world, kind):
    with open_pair(world) as (left, right, proxy):
        second = second_process(world, proxy._target, **SECOND[kind])
        with pytest.raises(LinkError, match=r"model\.width|run: |a newer process"):
            second.wait_open(HANG)
        second.close()
        both_ways(left, right, b"as if nothing had been")
        assert left.error is None and right.error is None
        assert left.meter.connections == right.meter.connections == 1 and proxy.connections == 1


def test_a_connection_that_says_nothing_displaces_nobody(world):
    """It has the peer's certificate: a copy of the machine that hangs, or one whose line was cut after the handshake."""
    context = client_context(world.identity("right"), world.identity("left").certificate)
    with open_pair(world) as (left, right, proxy):
        silent = [context.wrap_socket(socket.create_connection(proxy._target)) for _ in range(6)]
        wait_until(lambda: len(left._session.reception.greetings) >= 4)
        both_ways(left, right, b"still there")
        assert left.meter.connections == 1 and len(left._session.reception.greetings) == 4
        for sock in silent:
            sock.close()


def test_the_peer_gets_back_past_those_that_say_nothing(world):
    context = client_context(world.identity("right"), world.identity("left").certificate)
    with open_pair(world) as (left, right, proxy):
        hold, right._session.dialer.tend = right._session.dialer.tend, lambda *args, **more: None
        right.reset_connection()
        wait_until(lambda: left.state == "broken")
        silent = [context.wrap_socket(socket.create_connection(proxy._target)) for _ in range(6)]
        wait_until(lambda: len(left._session.reception.greetings) >= 4)
        right._session.dialer.tend = hold
        right._loop.wake()
        both_ways(left, right, b"back again")
        for sock in silent:
            sock.close()


def test_rubbish_with_the_peers_certificate_displaces_nobody(world):
    context = client_context(world.identity("right"), world.identity("left").certificate)
    hello = encode(Frame.make(Kind.HELLO, make_hello(terms(RIGHT), 0, QUICK, 999, ((0, 0),) * len(Channel)).encode()))
    with open_pair(world) as (left, right, proxy):
        for data in (b"rubbish" * 100, hello, encode(Frame.make(Kind.STEP, b"no HELLO"))):
            with context.wrap_socket(socket.create_connection(proxy._target)) as sock:
                sock.sendall(data)
                sock.settimeout(HANG)
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    while sock.recv(2**16):
                        pass
        both_ways(left, right, b"still there")
        assert left.error is None and left.meter.connections == 1


def test_a_peer_that_comes_back_with_other_settings_is_told_and_the_true_one_waited_for(world, caplog):
    with open_pair(world) as (left, right, proxy):
        hold, right._session.dialer.tend = right._session.dialer.tend, lambda *args, **more: None
        right.reset_connection()
        wait_until(lambda: left.state == "broken")
        with caplog.at_level(logging.WARNING, "thinwire.link"):
            wrong = second_process(world, proxy._target, config=SKEWED, incarnation=9)
            with pytest.raises(LinkError, match=r"model\.width: 128 here, 64 there"):
                wrong.wait_open(HANG)
            wrong.close()
            wait_until(lambda: "model.width: 64 here, 128 there" in caplog.text)
        assert left.error is None
        right._session.dialer.tend = hold
        right._loop.wake()
        both_ways(left, right, b"back again")
        assert left.meter.connections == 2


def test_a_peer_that_refuses_us_is_tried_again_once_it_was_met(world):
    """Its process was started again with another roster, and somebody notices: the worker that still trains waits for that."""
    with open_pair(world) as (left, right, proxy):
        stranger = Worker(RIGHT, world.identity("stranger").certificate)
        deaf = Listener(("127.0.0.1", 0), Endpoint(world.identity("left")), [stranger], QUICK)
        right_address, proxy._target = proxy._target, deaf.address
        proxy.cut()
        mine = world.identity("right").fingerprint
        wait_until(lambda: "refused this worker" in (problem := right.problem) and mine in problem)
        assert right.error is None and right.refused
        proxy._target = right_address
        proxy.cut()
        both_ways(left, right, b"back again")
        assert not right.refused
        deaf.close()


def test_a_restarted_peer_still_ends_the_epoch(world):
    with open_pair(world) as (left, _, proxy):
        second = second_process(world, proxy._target, incarnation=9)
        for link in (left, second):
            with pytest.raises(Interrupted, match="restarted"):
                link.receive(Channel.CONTROL, HANG)
        second.close()


def test_a_doubtful_connection_is_taken_up_again_if_the_next_one_leads_nowhere(world):
    options = LinkOptions(establish_seconds=0.5, close_seconds=3.0)
    kept = []
    with pair(world, options=options) as (left, right, _):
        left.wait_open(HANG)
        right.wait_open(HANG)
        listener = listener_of(left)
        listener._adopters[RIGHT] = kept.append  # the second connection gets through TLS, and nobody answers its HELLO
        right._session._doubtful = lambda now: not kept
        right._loop.wake()
        wait_until(lambda: kept)
        left.send(Frame.make(Kind.STEP, b"sent while it was put aside"), HANG)
        assert right.receive(Channel.CONTROL, HANG).payload == b"sent while it was put aside"
        right.send(Frame.make(Kind.STEP, b"and back"), HANG)
        assert left.receive(Channel.CONTROL, HANG).payload == b"and back"
        assert right.meter.connections == 1 and right.state == "open"
    for connection in kept:
        connection.end("close")


def listener_of(link: Link) -> Listener:
    """Return the listener that hands connections to a link."""
    finished = link._loop._finished
    return finished.func.__self__


@contextlib.contextmanager
def another_server(world, kind: str) -> Iterator[tuple[str, int]]:
    """Be somebody who is not the peer."""
    if kind == "another certificate":
        listener = Listener(
            ("127.0.0.1", 0), Endpoint(world.identity("stranger")), [Worker(RIGHT, world.identity("right").certificate)], QUICK
        )
        yield listener.address
        listener.close()
        return
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as client:
                        client.sendall(b"220 mail.example.org ESMTP" * 10)

        thread = threading.Thread(target=greet)
        thread.start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("kind", ["another certificate", "no TLS"])
def test_somebody_else_at_the_peers_address_for_a_while_ends_nothing(world, kind):
    words = {"another certificate": "shown " + world.identity("stranger").fingerprint, "no TLS": "does not speak TLS"}[kind]
    with open_pair(world) as (left, right, proxy), another_server(world, kind) as address:
        true_address, proxy._target = proxy._target, address
        proxy.cut()
        wait_until(lambda: words in right.problem)
        assert right.error is None
        proxy._target = true_address
        proxy.cut()
        both_ways(left, right, b"the true one is back")


@pytest.mark.parametrize("alive", [(False, True), (False, False), (True, False, True)], ids=str)
def test_of_several_that_wait_each_is_greeted_once(alive):
    """When the connection in use breaks, those that cannot be told HELLO are given up, and the others hear it once."""
    told: list[int] = []

    class Waiting:
        def __init__(self, number: int) -> None:
            self.number, self.said, self.connection = number, False, mock.Mock()

        def say(self, hello: Frame, now: float) -> None:
            if not alive[self.number]:
                raise ConnectionResetError("gone")
            told.append(self.number)
            self.said = True

    session = mock.Mock(connection=None)
    reception = Reception(session, None)
    session.do_without.side_effect = lambda problem, now: reception.lost(now)
    reception.greetings = [Waiting(number) for number in range(len(alive))]
    with mock.patch.object(reception, "hello"):
        reception.lost(0.0)
    assert told == [number for number, lives in enumerate(alive) if lives]
    assert [greeting.number for greeting in reception.greetings] == told
