"""Who is at the other end of a link: its worker id, its certificate and its address. Where these come from is not known here."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.config.registry import TRANSPORTS
from thinwire.util.shown import shown

STANDBYS = 2**20
"""The number of the replica in which standbys stand, one behind the other; real replicas have smaller ones."""
HOST_LETTERS = 253
"""Most characters of a host, as DNS has it."""


@dataclass(frozen=True, order=True)
class WorkerId:
    """Which stage of which replica a worker is."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"standby {self.stage}" if self.replica == STANDBYS else f"replica {self.replica} stage {self.stage}"

    def beside(self, side: int) -> WorkerId:
        """Return the worker id before (-1) or behind (1) in the same replica."""
        return WorkerId(self.replica, self.stage + side)

    def sides(self, stages: int) -> dict[int, WorkerId]:
        """Return the worker ids before (-1) and behind (1) that there are in a replica of so many stages."""
        return {side: self.beside(side) for side in (-1, 1) if 0 <= self.stage + side < stages}


@dataclass(frozen=True)
class Worker:
    """One entry; without an address the worker only dials out."""

    id: WorkerId
    certificate: str
    address: str | None = None
    name: str | None = None
    """What people call it."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        assert self.address is not None
        return split_address(self.address)


def check_address(address: str) -> None:
    """Refuse what no transport understands: `host:port` goes over TCP, `NAME://...` over the transport of that name."""
    name, separator, place = address.partition("://")
    if not separator or name == "tcp":
        split_address(address)
    elif name not in TRANSPORTS.names():
        known = ", ".join(TRANSPORTS.names())
        raise ValueError(
            f"address {shown(repr(address), 100)} is of an unknown transport; known are {known}: install the package of "
            "that one, or write host:port for TCP"
        )
    elif not 0 < len(place) <= HOST_LETTERS or not place.isprintable():
        raise ValueError(
            f"address {shown(repr(address), 100)} has no place behind ://; write 1 to {HOST_LETTERS} printable characters there"
        )


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_host = 0 < len(bare) <= HOST_LETTERS and bare.isprintable() and not set(bare) & set(" \"'") and (":" not in bare or bare != host)
    try:
        bare.encode("idna")  # as whoever looks it up will
    except UnicodeError:
        is_host = False
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 2**16
    if not colon or not is_host or not is_port:
        raise ValueError(
            f"address {shown(repr(address), 100)} is not host:port with a port from 1 to 65535; "
            "write it like 203.0.113.7:29500 or [::1]:29500"
        )
    return bare, int(port)
