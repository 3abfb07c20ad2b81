"""When to PING, when to doubt a connection and when to give it up. Pure arithmetic on times the caller passes in."""

from __future__ import annotations

import struct

from thinwire.link.errors import ProtocolError
from thinwire.link.options import LinkOptions

TOKEN = struct.Struct("<Q")
"""What a PING carries and its PONG returns."""
SMOOTHING = 0.125
"""Weight of a new sample in the smoothed round trip, as in TCP (RFC 6298)."""


def read_token(payload: bytes | bytearray | memoryview) -> int:
    """Read the token of a PONG."""
    if len(payload) != TOKEN.size:
        raise ProtocolError("length", len(payload), f"{TOKEN.size} bytes for PONG")
    return TOKEN.unpack(payload)[0]


class Heartbeat:
    """The signs of life of a link's connection."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options
        self._token = 0
        self.rtt: float | None = None
        """Smoothed round trip in seconds; None until the first PONG of the link."""
        self.echoes: dict[int, float] = {}
        """Tokens of a probe's PINGs -> when the PONG came (0: not yet)."""
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Start anew on another connection."""
        self.heard_at = now
        self._moved_at = now
        self._ping_at = now
        self._asked_at: float | None = None

    def moved(self, now: float) -> None:
        """Note that bytes went out and arrived: on a slow line a question waits for what was sent before it."""
        self._moved_at = now

    def heard(self, now: float) -> None:
        """Note that bytes came in."""
        self.heard_at = now

    def ping(self, now: float) -> int | None:
        """Return the token of a PING to send now, if one is due."""
        if now < self._ping_at:
            return None
        self._ping_at = now + self._options.ping_seconds
        if self._asked_at is not None:
            return None  # one question at a time: an unanswered one measures the silence
        self._token += 1
        self._asked_at = now
        return self._token

    def pong(self, token: int, now: float) -> None:
        """Take an answer in; stale or invented ones count as any other bytes."""
        if token in self.echoes:
            self.echoes[token] = now
        if token != self._token or self._asked_at is None:
            return
        sample = now - self._asked_at
        self._asked_at = None
        self.rtt = sample if self.rtt is None else self.rtt + SMOOTHING * (sample - self.rtt)

    def _doubt_at(self) -> float | None:
        if self._asked_at is None:
            return None
        since = max(self._asked_at, self.heard_at, self._moved_at)
        return since + (self.rtt or 0.0) + self._options.pong_grace_seconds

    def doubtful(self, now: float) -> bool:
        """Tell whether an answer is overdue and nothing else came either."""
        at = self._doubt_at()
        return at is not None and now >= at

    def silent(self, now: float) -> bool:
        """Tell whether the connection must be given up."""
        return now >= self.heard_at + self._options.silent_seconds

    def next_at(self, now: float) -> float:
        """Return when one of the answers above changes."""
        times = [self._ping_at, self.heard_at + self._options.silent_seconds]
        doubt = self._doubt_at()
        if doubt is not None and doubt > now:
            times.append(doubt)
        return min(times)
