"""What a path between two hosts is like: rate, delay, jitter, loss and queue, in each direction. No I/O."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

SMALLEST_QUEUE_KB = 64.0  # some forty packets: less starves TCP at any rate
SHORTEST_QUEUE_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Path:
    """Describe one direction of a path (rate of IP packets, one-way delay), and with `back` the other where it differs.

    Jitter is up to `jitter_ms` on top of the delay, uniform, held for 10 ms, order kept. `queue_kb` is the drop-tail queue before the
    link; unset, it is rate x round-trip time, at least 20 ms of the rate and 64 KB.
    """

    rate_mbps: float
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    queue_kb: float | None = None
    back: Path | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_mbps) and self.rate_mbps > 0):
            raise ValueError(f"rate_mbps is {self.rate_mbps}; a path needs a rate above 0, such as 80")
        for name in ("delay_ms", "jitter_ms"):
            if not 0 <= getattr(self, name) <= 10_000:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie between 0 and 10000")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss is {self.loss}; it is a probability from 0 up to, not including, 1 (0.5 % is 0.005)")
        if self.queue_kb is not None and self.queue_kb < 2:
            raise ValueError(f"queue_kb is {self.queue_kb}; it must hold a packet, so 2 at least")
        if self.back is not None and self.back.back is not None:
            raise ValueError("the back direction has a back direction of its own; a path has two directions")

    @property
    def rtt_ms(self) -> float:
        return self.delay_ms + (self.back or self).delay_ms

    def shapes(self) -> list[dict[str, float]]:
        """Return both directions as the forwarder reads them, the queue filled in."""
        found = []
        for direction in (self, self.back or self):
            shape = asdict(direction)
            del shape["back"]
            if direction.queue_kb is None:
                seconds = max(self.rtt_ms / 1e3, SHORTEST_QUEUE_SECONDS)
                shape["queue_kb"] = max(direction.rate_mbps * 1e3 / 8 * seconds, SMALLEST_QUEUE_KB)
            found.append(shape)
        return found
