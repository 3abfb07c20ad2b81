"""Hostile input to a listening link: strangers before TLS, and an authenticated peer that sends rubbish."""

from __future__ import annotations

import json
import math
import random
import socket
import ssl

import pytest

from link.support import LEFT, LOOPBACK, QUICK, RIGHT, terms
from patience import HANG, wait_until
from thinwire.link.contract import Contract, Flow, TensorForm
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import KINDS, Abort, LinkError, ProtocolError
from thinwire.link.frame import EPOCHS, Channel, Frame, Kind, encode
from thinwire.link.hello import make_hello
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.peer import Worker
from thinwire.link.tcp.contexts import client_context

CONTRACT = Contract(incoming=Flow.constant((TensorForm(0, (), 1000, exact=False),), 1))


@pytest.fixture
def listener(world):
    listener = Listener(LOOPBACK, Endpoint(world.identity("left")), [Worker(RIGHT, world.identity("right").certificate)], QUICK)
    yield listener
    listener.close()


def listening_link(world, listener) -> Link:
    return Link.listen(listener, Worker(RIGHT, world.identity("right").certificate), terms(LEFT), CONTRACT, options=QUICK)


def client_hello(world) -> bytes:
    """Record the first bytes of a real handshake."""
    outgoing = ssl.MemoryBIO()
    tls = client_context(world.identity("right"), world.identity("left").certificate).wrap_bio(ssl.MemoryBIO(), outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def test_strangers_bytes_do_not_disturb_a_listening_link(world, listener):
    generator = random.Random(5)
    start = client_hello(world)
    link = listening_link(world, listener)
    for _ in range(200):
        data = bytearray(generator.choice((start, generator.randbytes(200))))
        for _ in range(generator.randrange(5)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        with socket.create_connection(listener.address) as sock:
            sock.sendall(data[: generator.randrange(len(data) + 1)])
    assert link.error is None and link.state == "connecting"
    host, port = listener.address
    worker = Worker(LEFT, world.identity("left").certificate, f"{host}:{port}")
    peer = Link.connect(worker, Endpoint(world.identity("right")), terms(RIGHT), CONTRACT.mirrored(), options=QUICK)
    peer.send(Frame.make(Kind.STEP, b"through"), HANG)
    assert link.receive(Channel.CONTROL, HANG).payload == b"through"
    assert peer.close()
    link.close()


def hear(world, listener, *frames: bytes) -> LinkError:
    """Let the right peer send bytes; return how the listening link then failed."""
    link = listening_link(world, listener)
    context = client_context(world.identity("right"), world.identity("left").certificate)
    with context.wrap_socket(socket.create_connection(listener.address)) as sock:
        sock.sendall(b"".join(frames))
        wait_until(lambda: link.error is not None)
    link._loop.call(link._session.stop)
    link.close()
    assert link.error is not None
    return link.error


def greeting(**changes) -> bytes:
    """Encode the right peer's HELLO with some fields as they should not be."""
    content = json.loads(make_hello(terms(RIGHT), 0, QUICK, 0, ((0, 0),) * len(Channel)).encode())
    return encode(Frame.make(Kind.HELLO, json.dumps(content | changes).encode()))


EVIL = "\x1b]0;owned\x07\r\n\u202ethinwire: all is well\n" * 40


def test_the_reason_of_an_abort_is_shown_without_control_characters_and_not_at_any_length(world, listener):
    text = str(hear(world, listener, greeting(), encode(Frame.make(Kind.ABORT, b"\1" + EVIL.encode()[:4000]))))
    assert text.isprintable() and len(text) < 1100 and "\\x1b]0;owned" in text


@pytest.mark.parametrize(
    "payload", [b"", b"\0", b"\xff", b"\x08stopping: ", b"recovering: ", b"stopping: end", b"\0replaced: ", bytes(4000)]
)
def test_an_abort_whose_code_is_not_known_is_a_plain_loss_whatever_its_text_says(world, listener, payload):
    error = hear(world, listener, greeting(), encode(Frame.make(Kind.ABORT, payload)))
    assert type(error) is LinkError and error.code is Abort.LOST


@pytest.mark.parametrize("code", Abort)
def test_the_code_of_an_abort_says_what_it_means(world, listener, code):
    error = hear(world, listener, greeting(), encode(Frame.make(Kind.ABORT, bytes([code]) + b"why")))
    assert type(error) is KINDS.get(code, LinkError) and error.code is code and error.reason == "why"


@pytest.mark.parametrize(
    "change",
    [
        {"run": EVIL},
        {"config": {EVIL: EVIL}},
        {"config": {"model.width": {EVIL: [EVIL]}}},
        {"config": {f"{number}{EVIL}": 1 for number in range(50)}},
        {"config_hash": EVIL},
        {EVIL: 1},
        {"epoch": EVIL},
        {"credit": [EVIL] * 100},
        {"stage": 2**64 - 1},
    ],
    ids=lambda change: ascii(next(iter(change)))[:12],
)
def test_what_a_greeting_differs_in_is_shown_likewise(world, listener, change):
    text = str(hear(world, listener, greeting(**change)))
    assert text.isprintable() and len(text) < 2000, text


@pytest.mark.parametrize("epoch", [EPOCHS, 2**32, 2**63, -1, 1.0, math.nan, math.inf, True, None])
def test_an_epoch_that_no_header_holds_is_refused_by_name(world, listener, epoch):
    error = hear(world, listener, greeting(epoch=epoch))
    assert isinstance(error, ProtocolError) and "HELLO.epoch" in str(error)


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"run":' * 5000, b'"\\ud800"', "{}".encode("utf-16"), b"9" * 5000])
def test_a_greeting_that_is_no_object_is_refused_by_name(world, listener, data):
    error = hear(world, listener, encode(Frame.make(Kind.HELLO, data)))
    assert isinstance(error, ProtocolError) and "HELLO" in str(error)


def rubbish(generator: random.Random, hello: bytes) -> bytes:
    """Make input for after the handshake: damaged HELLO, frames without HELLO, frames after it."""
    frames = [encode(Frame.make(Kind.DATA, bytes(100), sequence=1)), encode(Frame.make(Kind.STEP, bytes(10), sequence=1))]
    data = bytearray(generator.choice([hello, hello + frames[0], frames[1], hello + frames[1] + frames[0], generator.randbytes(300)]))
    for _ in range(generator.randrange(1, 4)):
        data[generator.randrange(len(data))] = generator.randrange(256)
    return bytes(data)


def test_an_authenticated_peer_that_sends_rubbish_gets_a_named_error(world, listener):
    generator = random.Random(6)
    consumed = ((0, 0),) * len(Channel)
    hello = encode(Frame.make(Kind.HELLO, make_hello(terms(RIGHT), 0, QUICK, 0, consumed).encode()))
    context = client_context(world.identity("right"), world.identity("left").certificate)
    link = listening_link(world, listener)
    refused = 0
    for _ in range(150):
        with context.wrap_socket(socket.create_connection(listener.address)) as sock:
            sock.sendall(rubbish(generator, hello))
            sock.settimeout(HANG)
            sock.recv(10)
        wait_until(lambda link=link: link.state != "hello")
        if link.error is not None:
            assert isinstance(link.error, LinkError)
            refused += 1
            link.close()
            link = listening_link(world, listener)
    assert refused > 50
    link._loop.call(link._session.stop)
    link.close()
