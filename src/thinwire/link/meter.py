"""What a link has carried and how long it waited.

payload: the caller's bytes, counted once. framed: with headers, the link's own frames and what was sent again. socket: bytes given to and
taken from TCP, so also TLS records and handshakes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from thinwire.link.frame import Channel


def per_channel() -> list[int]:
    return [0] * len(Channel)


@dataclass
class LinkTraffic:
    """One direction."""

    payload: list[int] = field(default_factory=per_channel)
    framed: list[int] = field(default_factory=per_channel)
    frames: list[int] = field(default_factory=per_channel)
    """Whole frames of the caller."""
    socket: int = 0

    def snapshot(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            f"{name}_{channel.name.lower()}": getattr(self, name)[channel]
            for name in ("payload", "framed", "frames")
            for channel in Channel
        }
        return {
            "payload": sum(self.payload),
            "framed": sum(self.framed),
            "socket": self.socket,
            "frames": sum(self.frames),
            **values,
        }


@dataclass
class LinkMeter:
    """Both directions of one link."""

    sent: LinkTraffic = field(default_factory=LinkTraffic)
    received: LinkTraffic = field(default_factory=LinkTraffic)
    connections: int = 0
    """Times the link has opened."""
    retransmitted: int = 0
    """Parts that were sent again after a reset."""
    paced_seconds: float = 0.0
    """Time that work waited for the pace or the emulated line."""
    blocked_seconds: float = 0.0
    """Time that callers waited in `send` for credit."""
    _paced_since: float | None = None

    def note_pace(self, held: bool, now: float) -> None:
        """Note whether work waits for the wire at this moment."""
        if held and self._paced_since is None:
            self._paced_since = now
        elif not held and self._paced_since is not None:
            self.paced_seconds += now - self._paced_since
            self._paced_since = None

    def absorb(self, other: LinkMeter) -> None:
        """Add the socket bytes that a connection had before it belonged to this link."""
        self.sent.socket += other.sent.socket
        self.received.socket += other.received.socket

    def snapshot(self) -> dict[str, Any]:
        """Return every number in one dict."""
        return {
            "sent": self.sent.snapshot(),
            "received": self.received.snapshot(),
            "reconnects": max(0, self.connections - 1),
            "retransmitted": self.retransmitted,
            "paced_seconds": self.paced_seconds,
            "blocked_seconds": self.blocked_seconds,
        }
