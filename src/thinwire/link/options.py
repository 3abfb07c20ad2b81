"""Every number of a link. Seconds are monotonic."""

from __future__ import annotations

from dataclasses import dataclass

LINGER_SECONDS = 1.0
"""How long an end that got a goodbye waits for the other to hang up."""
SERVICES = ("standby",)
"""What a connection may be for besides the link of two neighbours: the client says so in the handshake (ALPN)."""
MAX_REASON_LETTERS = 1000
"""Most characters of the reason of an ABORT; a frame has room for them in any script."""


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Limits and times of one link; the credits must be the same at both ends."""

    credit_frames: int = 256
    """Frames per channel between `send` here and `receive` there; `send` blocks beyond."""
    credit_bytes: int = 64 * 2**20
    """Payload bytes per channel likewise; one larger frame may travel alone."""
    ping_seconds: float = 1.0
    """Time between PINGs."""
    pong_grace_seconds: float = 1.0
    """A PONG this much later than the round trip opens a second connection; the first that works wins."""
    silent_seconds: float = 10.0
    """A connection without any byte for this long is given up."""
    reconnect_seconds: float = 60.0
    """A link without a connection for this long fails."""
    establish_seconds: float = 5.0
    """Longest time for TCP, TLS and HELLO of one attempt."""
    backoff_seconds: float = 0.05
    """First pause between attempts; doubles, with jitter."""
    backoff_limit_seconds: float = 1.0
    """Longest pause between attempts."""
    ack_seconds: float = 0.25
    """Longest time a received frame stays unacknowledged."""
    ack_bytes: int = 256 * 2**10
    """Most received bytes that stay unacknowledged."""
    close_seconds: float = 5.0
    """Longest time `close` waits for the peer to acknowledge everything."""
    abort_seconds: float = 2.0
    """Longest time spent on delivering an ABORT."""
    pace_mbps: float | None = None
    """Most Mbit/s to send; unset: no limit."""
    congestion: str = "bbr"
    """TCP congestion control, where the kernel has and allows it."""
    unsent_bytes: int = 16 * 2**10
    """Bytes the kernel may hold beyond those in flight; more would queue a snapshot ahead of a payload."""

    held: bool = False
    """Whether a supervisor on this machine keeps the port to listen on for this worker."""

    def __post_init__(self) -> None:
        for name in ("credit_frames", "credit_bytes", "ping_seconds", "silent_seconds", "reconnect_seconds", "establish_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"link.{name} is {getattr(self, name)}; choose a number above 0")
        if self.silent_seconds <= self.ping_seconds:
            raise ValueError(
                f"link.silent_seconds is {self.silent_seconds}, not above link.ping_seconds {self.ping_seconds}: "
                "a healthy link would be given up; choose several times the ping"
            )
        if self.pace_mbps is not None and self.pace_mbps <= 0:
            raise ValueError(f"link.pace_mbps is {self.pace_mbps}; choose a number above 0, or leave it unset for no limit")
