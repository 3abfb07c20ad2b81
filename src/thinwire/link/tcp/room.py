"""Where connections wait until their handshake is done, and who has to go when too many do. No I/O.

Strangers cost nothing, so there are limits, and the rule who goes decides whether the true peer gets in. Whoever has said nothing yet waits
apart: a client's first bytes come right behind its connection, however long the round trip, so the oldest of these can go, and idle ones
never crowd out a handshake. Of those who talk, the refused go first, then those that did not knock as a member of the roster does
(`knock.py`), then members. In each group the address that holds the most gives way with its oldest, so one address harms itself first.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.link.tcp.stream import TlsStream

MOST_QUIET = 128
"""Connections that have sent nothing yet."""
MOST_TALKING = 64
"""Connections that may be in their handshake at once."""


@dataclass(eq=False)
class Guest:
    """A connection that is not a link's yet."""

    socket: socket.socket
    host: str
    name: str
    deadline: float
    stream: TlsStream | None = None
    """Made when the first bytes come."""
    member: bool = False
    """Whether it knocked as a member of the roster does."""
    refused: bool = False

    @property
    def rank(self) -> int:
        """Return how much it is worth keeping."""
        return 0 if self.refused else 2 if self.member else 1


class Room:
    """All guests of a listener."""

    def __init__(self, quiet: int = MOST_QUIET, talking: int = MOST_TALKING) -> None:
        self._most_quiet, self._most_talking = quiet, talking
        self._quiet: dict[Guest, str] = {}
        self._talking: dict[Guest, str] = {}

    def __iter__(self) -> Iterator[Guest]:
        """Go through all guests as they are now."""
        return iter([*self._quiet, *self._talking])

    def __contains__(self, guest: Guest) -> bool:
        return guest in self._quiet or guest in self._talking

    def __len__(self) -> int:
        return len(self._quiet) + len(self._talking)

    @property
    def crowded(self) -> bool:
        """Tell whether strangers who talk should be refused at once."""
        return 2 * len(self._talking) >= self._most_talking

    def enter(self, guest: Guest) -> Guest | None:
        """Let a connection in; return whom to show out for it."""
        self._quiet[guest] = neighbourhood(guest.host)
        return worst(self._quiet) if len(self._quiet) > self._most_quiet else None

    def spoke(self, guest: Guest) -> None:
        """Note the first bytes of a guest."""
        self._talking[guest] = self._quiet.pop(guest)

    def excess(self) -> Guest | None:
        """Return whom to show out if too many talk, perhaps the one who came last."""
        return worst(self._talking) if len(self._talking) > self._most_talking else None

    def leave(self, guest: Guest) -> None:
        self._quiet.pop(guest, None)
        self._talking.pop(guest, None)

    def least(self) -> Guest | None:
        """Return who can best be spared, if there is anyone."""
        return worst(self._quiet or self._talking)


def worst(guests: dict[Guest, str]) -> Guest | None:
    """Return the oldest one of the address that holds the most, among those least worth keeping."""
    lowest = min((guest.rank for guest in guests), default=None)
    group = {guest: where for guest, where in guests.items() if guest.rank == lowest}
    held = Counter(group.values())
    return max(group, key=lambda guest: held[group[guest]], default=None)  # the first of several, which is the oldest


def neighbourhood(host: str) -> str:
    """Return what counts as one address: with IPv6 everyone has 2^64 of them."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(getattr(address, "ipv4_mapped", None) or address)
