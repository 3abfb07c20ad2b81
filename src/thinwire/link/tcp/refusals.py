"""Tell of refused connections without filling the log: strangers decide how many there are."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

LOG = logging.getLogger("thinwire.link")
PAUSE_SECONDS = 1.0
"""Time between two lines about one address."""
MOST_LINES = 10
"""Lines in that time about all addresses together."""
MOST_ADDRESSES = 256
"""Addresses that are remembered."""


class Refusals:
    """Log at most one line a second for each address, and ten for all; say with the next one how many were left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.latest: deque[str] = deque(maxlen=100)
        """Who and why, those that were not logged included."""
        self._told: dict[str, float] = {}
        """When an address was last told of, the longest ago first."""
        self._untold: dict[str, int] = {}
        self._times: deque[float] = deque(maxlen=MOST_LINES)

    def note(self, host: str, name: str, reason: str, level: int = logging.WARNING) -> None:
        """Remember a refusal; log it if its address, and all together, have not had their share."""
        self.latest.append(f"{name}: {reason}")
        if not LOG.isEnabledFor(level):
            return
        now = self._clock()
        full = len(self._times) == MOST_LINES and now < self._times[0] + PAUSE_SECONDS
        if full or now < self._told.get(host, float("-inf")) + PAUSE_SECONDS:
            if host in self._untold or len(self._untold) < MOST_ADDRESSES:
                self._untold[host] = self._untold.get(host, 0) + 1
            return
        self._times.append(now)
        self._told.pop(host, None)
        self._told[host] = now
        if len(self._told) > MOST_ADDRESSES:
            del self._told[next(iter(self._told))]
        others = self._untold.pop(host, 0)
        more = f" (and {others} others from {host} before)" if others else ""
        LOG.log(level, "refused a connection from %s: %s%s", name, reason, more)
