"""Say what holds a run up: computing, a line, or waiting. Made from what the stages that are seen from here say of their recent steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

RECENT = 20
SPANS = ("compute", "encode", "wait", "decode")
BUSY = 0.4
"""A stage or line that is busy for less than this share of its time holds nobody up: even of short pipelines, half is bubble."""


class Verdict:
    """Gather the shares of time of stages and lines."""

    def __init__(self, mbps: float | None = None, *, alone: bool = False) -> None:
        """`mbps` is what every line carries, if that is limited; `alone`: only one of several stages is seen."""
        self.mbps, self.alone, self.linked = mbps, alone, False
        self.measured: dict[Hashable, float] = {}
        """What the line behind a stage was found to carry, in Mbit/s, by stage."""
        self.compute: dict[Hashable, deque[float]] = {}
        self.line: dict[Hashable, deque[float]] = {}

    def note(self, stage: Hashable, values: Mapping[str, Any]) -> None:
        """Take in what a stage says of a step."""
        self.linked = self.linked or "left_mbps" in values or "right_mbps" in values
        total = sum(values.get(f"{span}_seconds") or 0.0 for span in SPANS)
        if total > 0:
            self.compute.setdefault(stage, deque(maxlen=RECENT)).append((values.get("compute_seconds") or 0.0) / total)
        shares = [self.share(stage, side, values) for side in ("right", "left")]
        known = [share for share in shares if share is not None]
        if known:
            self.line.setdefault(stage, deque(maxlen=RECENT)).append(max(known))

    def share(self, stage: Hashable, side: str, values: Mapping[str, Any]) -> float | None:
        """Return the share of a line that a stage uses."""
        sent, carries = values.get(f"{side}_mbps"), self.mbps or (self.measured.get(stage) if side == "right" else None)
        return None if sent is None or not carries else sent / carries

    def __str__(self) -> str:
        if not self.linked:
            return ""
        compute, line = largest_mean(self.compute), largest_mean(self.line)
        used = f"line used {100 * line:.0f} %" if self.line else f"compute {100 * compute:.0f} %"
        if max(compute, line) >= BUSY:
            return f"bound by {'compute' if compute >= line else 'the line'}; {used}"
        both = f"compute {100 * compute:.0f} %, {used}" if self.line else used
        return f"{'waiting for other stages' if self.alone else 'bound by latency'}; {both}"


def largest_mean(shares: Mapping[Hashable, deque[float]]) -> float:
    """Return the mean share of whoever is busiest."""
    return max((sum(each) / len(each) for each in shares.values()), default=0.0)
