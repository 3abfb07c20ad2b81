"""Messages between replicas: of any length, to everyone on any graph, and refused when they are not what was announced."""

from __future__ import annotations

import pytest

from thinwire.replicas.graph import make_graph
from thinwire.replicas.peers import CHUNK_BYTES, LARGEST, LENGTH, Peers
from thinwire.testing.together import together


@pytest.mark.parametrize("graph", ["complete", "ring", "0-1,1-2,1-3"])
def test_everyone_gets_what_everyone_gives(graph):
    given = [bytes([replica]) * (replica * 700_000) for replica in range(4)]
    assert together(4, lambda peers: peers.gather(given[peers.index]), graph) == [given] * 4


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
def test_messages_of_different_lengths_are_swapped(size):
    messages = [bytes(size), b"short"]
    found = together(2, lambda peers: peers.swap({1 - peers.index: messages[peers.index]}))
    assert found == [{1: messages[1]}, {0: messages[0]}]


class Script:
    """A wire whose other end says what a test lets it say."""

    def __init__(self, *said: bytes) -> None:
        self.said = list(said)

    def send(self, data: bytes) -> None:
        pass

    def receive(self) -> bytes:
        return self.said.pop(0)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ((LENGTH.pack(LARGEST + 1),), "the limit is"),
        ((b"short",), "sent 5 bytes where 8 were expected"),
        ((LENGTH.pack(3), b"longer"), "sent 6 bytes where 3 were expected"),
    ],
)
def test_what_was_not_announced_is_refused(said, reason):
    peers = Peers(0, make_graph("complete", 2), {1: Script(*said)})
    with pytest.raises(ValueError, match=reason):
        peers.swap({1: b"x"})


def test_parts_that_do_not_fit_are_refused():
    peers = Peers(0, make_graph("0-1,1-2", 3), {1: Script()})
    for data in (b"x", LENGTH.pack(7) + LENGTH.pack(0), LENGTH.pack(1) + LENGTH.pack(9) + b"few"):
        with pytest.raises(ValueError, match="a message between replicas"):
            peers._unpack(data)
