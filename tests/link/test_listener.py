"""Whom a listener trusts, and where it takes them: links, services, nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from link.support import LEFT, LOOPBACK, QUICK, RIGHT, terms
from patience import HANG, wait_until
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.identity import Identity, make_identity
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.options import SERVICES
from thinwire.link.peer import STANDBYS, Worker, WorkerId

OTHER = WorkerId(STANDBYS, 0)
(SERVICE,) = SERVICES


@pytest.fixture(scope="module")
def identities(tmp_path_factory) -> dict[str, Identity]:
    """Make identities with the same name in their certificates, as `thinwire keys` does."""
    return {name: make_identity(tmp_path_factory.mktemp(name), "worker") for name in ("left", "right", "other")}


@pytest.fixture
def people(identities) -> dict[str, Worker]:
    worker_ids = {"left": LEFT, "right": RIGHT, "other": OTHER}
    return {name: Worker(worker_id, identities[name].certificate) for name, worker_id in worker_ids.items()}


@pytest.fixture
def listener(identities, people) -> Iterator[Listener]:
    listener = Listener(LOOPBACK, Endpoint(identities["left"]), [people["right"]], QUICK, [people["other"]])
    yield listener
    listener.close()


def dial(identities, listener: Listener, name: str, worker_id: WorkerId, service: str | None = None) -> Link:
    host, port = listener.address
    target = Worker(LEFT, identities["left"].certificate, f"{host}:{port}")
    return Link.connect(target, Endpoint(identities[name]), terms(worker_id), Contract(), options=QUICK, service=service)


def test_a_question_never_reaches_the_link_of_the_neighbour_who_asks(identities, people, listener):
    """A neighbour has a link here and asks something too: the link goes on, the service gets the question."""
    asked: list[WorkerId] = []

    def serve(client: WorkerId, connection) -> None:
        asked.append(client)
        threading.Thread(target=answer, args=(client, connection)).start()

    def answer(client: WorkerId, connection) -> None:
        link = Link.accept(listener, connection, Worker(client, ""), terms(LEFT), Contract(), options=QUICK)
        link.wait_open(HANG)
        link.send(Frame.make(Kind.STEP, b"answer", epoch=0))
        link.close()

    left = Link.listen(listener, people["right"], terms(LEFT), Contract(), options=QUICK)
    right = dial(identities, listener, "right", RIGHT)
    right.wait_open(HANG)
    early = dial(identities, listener, "right", RIGHT, SERVICE)
    wait_until(lambda: early._session.dialer._failures)  # nobody serves it yet
    assert not early._opened.is_set()
    listener.services[SERVICE] = serve
    early.wait_open(HANG)
    assert bytes(early.receive(Channel.CONTROL, HANG).payload) == b"answer"
    assert asked == [RIGHT] and left.state == right.state == "open" and left.meter.connections == 1
    for link in (early, right, left):
        link.close()


def test_others_are_turned_away_until_they_are_peers(identities, people, listener):
    """A standby that took a place calls before its neighbour knows: it is not refused, and gets through once it is a peer."""
    taking = Worker(RIGHT, people["other"].certificate)
    link = dial(identities, listener, "other", RIGHT)
    wait_until(lambda: link._session.dialer._failures)
    assert not link._opened.is_set() and not listener.refusals
    listener.admit([taking])
    left = Link.listen(listener, taking, terms(LEFT), Contract(), options=QUICK)
    link.wait_open(HANG)
    left.wait_open(HANG)
    for each in (link, left):
        each.close()


def test_whoever_is_no_longer_admitted_is_refused(identities, people, listener):
    listener.admit([Worker(RIGHT, people["other"].certificate)])
    link = dial(identities, listener, "right", RIGHT)
    with pytest.raises(ConnectionError, match=r"refused this worker.*no standby may have taken"):
        link.wait_open(HANG)
    wait_until(lambda: listener.refusals)
    link.close()
