"""A token bucket, as the time at which the link is free again. Keeps no thread and reads no clock: the caller says what time it is."""

from __future__ import annotations


class TokenBucket:
    """Send `rate` bytes per second, up to `burst` bytes at once after a pause; without a burst it is a serial line."""

    def __init__(self, rate: float | None, burst: float = 0.0) -> None:
        if rate is not None and rate <= 0:
            raise ValueError(f"a rate of {rate} bytes per second cannot send anything; choose a number above 0, or none for no limit")
        self.rate = rate
        self.burst = burst
        self.free_at = float("-inf")

    def take(self, size: int, now: float, extra_seconds: float = 0.0) -> float:
        """Occupy the line with `size` bytes and `extra_seconds`; return when the last of them has left."""
        credit = 0.0 if self.rate is None else self.burst / self.rate
        transmission = 0.0 if self.rate is None else size / self.rate
        self.free_at = max(self.free_at, now - credit) + transmission + extra_seconds
        return max(now, self.free_at)
