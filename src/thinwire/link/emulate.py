"""The wire behind a connection: nothing, a pace, or an emulated link. Same interface, any operating system, no root.

Every piece of socket bytes first occupies the line for bytes/rate, then travels for the one-way delay plus jitter, which occupies nothing,
and arrives in order. It happens at the sender, inside the I/O thread; no clock is read here. The TLS handshake and HELLO are not delayed.
"""

from __future__ import annotations

import random
from collections import deque

from thinwire.config.profiles import LinkProfile
from thinwire.link.pace import TokenBucket

LOOKAHEAD_SECONDS = 0.005
"""Work is taken this much before the line is free, so that a late wake-up leaves no gap; a more urgent frame waits as much longer."""

PIECE_SECONDS = 0.1
"""A piece that occupies the line for longer arrives bit by bit."""


class Wire:
    """Carry pieces of bytes with a rate and a delay."""

    def __init__(
        self,
        rate: float | None = None,
        *,
        delay: float = 0.0,
        jitter: float = 0.0,
        latency_occupies: bool = False,
        burst: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.line = TokenBucket(rate, burst)
        self.delay = delay
        self.jitter = jitter
        self.latency_occupies = latency_occupies
        self.plain = rate is None and not delay and not jitter
        """Whether bytes pass untouched."""
        self._random = random.Random(seed)
        self._flight: deque[tuple[float, bytes]] = deque()
        self._last_arrival = float("-inf")

    @property
    def limited(self) -> bool:
        return self.line.rate is not None or self.latency_occupies

    def accepts(self, now: float) -> bool:
        """Tell whether the line will be free soon enough to take another piece."""
        return not self.limited or now >= self.accepts_at()

    def accepts_at(self) -> float:
        """Return when it will accept."""
        return self.line.free_at - LOOKAHEAD_SECONDS

    def admit(self, data: bytes, now: float, frames: int = 0) -> float:
        """Take a piece that starts `frames` frames; return when it arrives."""
        # protocol_nanogpt's rule: each frame holds the line for its latency as well
        held = frames * self.delay if self.latency_occupies else 0.0
        size = max(1, len(data) if self.line.rate is None else int(self.line.rate * PIECE_SECONDS))
        for start in range(0, len(data) - size, size):  # the far end sees bytes while a long piece is on its way
            self._carry(data[start : start + size], now, 0.0)
        return self._carry(data[(len(data) - 1) // size * size :], now, held)

    def _carry(self, data: bytes, now: float, held: float) -> float:
        left = self.line.take(len(data), now, held)
        travel = (0.0 if self.latency_occupies else self.delay) + (self._random.uniform(0.0, self.jitter) if self.jitter else 0.0)
        arrival = max(left + travel, self._last_arrival)
        self._last_arrival = arrival
        self._flight.append((arrival, data))
        return arrival

    def due(self, now: float) -> list[bytes]:
        """Return the pieces that have arrived."""
        pieces = []
        while self._flight and self._flight[0][0] <= now:
            pieces.append(self._flight.popleft()[1])
        return pieces

    @property
    def next_at(self) -> float | None:
        """Return when the next piece arrives."""
        return self._flight[0][0] if self._flight else None

    @property
    def in_flight(self) -> int:
        return len(self._flight)

    def cut(self) -> None:
        """Lose what is in flight, as a broken connection does."""
        self._flight.clear()


def make_wire(profile: LinkProfile, peer: LinkProfile, pace_mbps: float | None, seed: int = 0) -> Wire:
    """Build the wire from an end with `profile` to one with `peer`: the slower of up-link, down-link and pace counts."""
    rates = [mbps for mbps in (profile.up_mbps, peer.down_mbps, pace_mbps) if mbps is not None]
    rate = min(rates) * 1e6 / 8 if rates else None
    return Wire(
        rate,
        delay=max(profile.delay_ms, peer.delay_ms) / 1e3,
        jitter=max(profile.jitter_ms, peer.jitter_ms) / 1e3,
        latency_occupies=profile.latency_occupies or peer.latency_occupies,
        seed=seed,
    )
