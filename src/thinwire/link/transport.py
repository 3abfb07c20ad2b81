"""The transport seam: how bytes get to a peer and back, and who it is. Nothing blocks but `Transport.wait`; failures are OSErrors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol

from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker
from thinwire.link.problem import Problem


class ByteStream(Protocol):
    """Bytes to and from one peer, whose certificate (DER) is `peer`, for a `service` or a link; `problem` says how far it has come."""

    peer: bytes
    service: str | None
    problem: Problem
    congestion: str
    exchanged: tuple[int, int]
    """Bytes sent and received on the network until it was ready."""

    def ready(self) -> bool:
        """Go on with being made; tell whether the peer has proven who it is. Raises Unreached."""

    def read(self) -> tuple[int, list[bytes]]:
        """Take in what has come: its bytes on the network, and what can be read. Alert: the peer does not want this end."""

    def seal(self, data: bytes) -> bytes:
        """Return the bytes for the network that carry the data; they are sent in this order."""

    def send(self, data: memoryview) -> int:
        """Give sealed bytes to the network; return how many it takes now."""

    def unacknowledged(self) -> int:
        """Return how many bytes may still be on their way; 0 where nobody knows."""

    def end(self, how: Literal["output", "close", "reset"]) -> None:
        """Send no more but read on, let go, or break at once as a fault does. Raises nothing."""


class Acceptor(Protocol):
    """Takes streams at an address; `refusals` says who was refused lately, and why."""

    address: tuple[str, int]
    refusals: Iterable[str]

    def admit(self, certificates: Iterable[str]) -> None:
        """Let these (PEM) in from now on, and nobody else; the first call begins."""


class Transport(Protocol):
    """Made with an Identity and a Runtime, for one thread, which waits in it for its streams, or for one acceptor."""

    def dial(self, peer: Worker, options: LinkOptions, service: str | None, *, resolve: bool) -> ByteStream:
        """Begin a stream to a peer; `resolve`: look its address up again, which may take a moment. Raises Unreached."""

    def listen(self, address: str | tuple[str, int], options: LinkOptions, take: Callable[[ByteStream], None]) -> Acceptor:
        """Hand streams of the admitted, once ready, to `take`, which does not wait. ValueError: the address cannot be had."""

    def wait(self, streams: Mapping[ByteStream, bool], seconds: float) -> list[ByteStream]:
        """Return those that can be read or gone on with, or take bytes (True); none when the time is over, or after `wake`."""

    def wake(self) -> None:
        """End a wait, or else the next one; any thread may call it."""

    def close(self) -> None:
        """Wait and accept no more; streams that were handed over stay."""
