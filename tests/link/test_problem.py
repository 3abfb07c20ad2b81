"""Why there is no connection: each cause has its own words and its own remedy."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from link.support import LEFT, RIGHT, terms
from patience import HANG
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import LinkError
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker
from thinwire.link.problem import given_up
from thinwire.link.tcp.words import no_answer, not_connected

SHORT = LinkOptions(reconnect_seconds=2.0, establish_seconds=0.3, close_seconds=1.0)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Listen and accept, as the kernel does, and say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def error_of(world, address: tuple[str, int]) -> str:
    """Dial an address; return what the link says in the end."""
    host, port = address
    link = Link.connect(
        Worker(LEFT, world.identity("left").certificate, f"{host}:{port}"),
        Endpoint(world.identity("right")),
        terms(RIGHT),
        Contract(),
        options=SHORT,
    )
    with pytest.raises(LinkError) as caught:
        link.wait_open(HANG)
    link.close()
    return str(caught.value)


def test_nothing_listens_there(world, silent):
    address = silent.getsockname()
    silent.close()
    error = error_of(world, address)
    assert "refused the connection" in error and "start the worker there" in error
    assert "larger --link.reconnect_seconds, now 2" in error


def test_no_answer_to_tcp(world):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        fill = [socket.socket() for _ in range(4)]
        for each in fill:
            each.setblocking(False)
            each.connect_ex(server.getsockname())  # its queue is full: more are not answered, as behind a firewall
        error = error_of(world, server.getsockname())
        for each in fill:
            each.close()
    assert "did not answer" in error and "no TCP connection" in error and "firewall" in error and "--link.reconnect_seconds" in error


def test_no_tls_from_whoever_took_the_connection(world, silent):
    error = error_of(world, silent.getsockname())
    assert "took the connection, but no TLS handshake followed" in error and "another program" in error


def test_a_listening_end_says_how_it_should_have_been_reached(world):
    worker = Worker(RIGHT, world.identity("right").certificate)
    listener = Listener(("127.0.0.1", 0), Endpoint(world.identity("left")), [worker], SHORT)
    link = Link.listen(listener, worker, terms(LEFT), Contract(), options=SHORT)
    with pytest.raises(LinkError, match=r"has not connected yet.*its roster has the address.*--link\.reconnect_seconds"):
        link.wait_open(HANG)
    link.close()
    listener.close()


def told(number: int) -> str:
    return str(not_connected("peer:9", OSError(number, os.strerror(number))))


def test_every_cause_of_no_tcp_has_its_own_words():
    unresolved = str(not_connected("peer:9", socket.gaierror(socket.EAI_NONAME, "Name or service not known")))
    texts = [told(number) for number in (errno.ECONNREFUSED, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EACCES)]
    assert len({*texts, unresolved}) == 5 and all("peer:9" in text for text in texts)
    assert "no way to it" in told(errno.EHOSTUNREACH) and "VPN" in told(errno.EHOSTUNREACH)
    assert "spelling" in unresolved and "firewall" in told(errno.ETIMEDOUT)


def test_more_time_is_named_only_where_it_may_help():
    unresolved = not_connected("peer:9", socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    assert "reconnect_seconds" not in str(given_up("it", 60.0, unresolved))
    assert "reconnect_seconds" in str(given_up("it", 60.0, no_answer("peer:9", 5.0)))
