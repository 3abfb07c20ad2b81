"""A worker as others meet it: its identity, its clock and threads, and the transport of each address.

The name in front of `://` chooses the transport; an address without one is `host:port` and goes over TCP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.config.registry import TRANSPORTS
from thinwire.link.identity import Identity
from thinwire.link.transport import Transport
from thinwire.util.runtime import REAL, Runtime


@dataclass(frozen=True)
class Endpoint:
    """What every link and listener of a worker is made with."""

    identity: Identity
    runtime: Runtime = REAL
    transports: dict[str, Callable[[Identity, Runtime], Transport]] = field(default_factory=dict, repr=False, compare=False)
    """Those that were found so far, by the names in front of addresses."""

    def transport(self, address: str | tuple[str, int]) -> Transport:
        """Make a transport for one thread that reaches an address, or listens there."""
        scheme = address.partition("://")[0] if isinstance(address, str) and "://" in address else "tcp"
        if scheme not in self.transports:
            self.transports[scheme] = TRANSPORTS.load(scheme)
        return self.transports[scheme](self.identity, self.runtime)
