"""Estimate when a run ends: from its recent steps, the validations to come and the time limit. Pure arithmetic on times it is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import mean, median
from typing import Any

RECENT = 20
"""Steps that an estimate is made from: a machine that gets slower, or a line that gets faster, shows within so many."""

OUTLIER = 5.0
"""A step that takes so many times as long as half of the recent ones is none of the usual."""


class Estimate:
    """Watch steps go by; say how long the rest takes."""

    def __init__(self, steps: int, seconds: float | None = None, validate_every: int = 0) -> None:
        """`seconds` is the limit of training time, `validate_every` the steps between validations; none: only at the end."""
        self.steps, self.limit, self.validate_every = steps, seconds, validate_every
        self.done = 0
        self.recent: deque[float] = deque(maxlen=RECENT)
        """Seconds of the last steps, without validations."""
        self.validation: float | None = None
        """Seconds of the last validation."""
        self.last: float | None = None
        self.began: float | None = None
        """Training time of the run when this stretch of it began; the limit counts from there."""
        self.trained = 0.0

    def note(self, step: int, values: Mapping[str, Any], now: float) -> None:
        """Take a finished step in. A step that is not a later one is done again after a loss: what lies between was no step."""
        if self.last is not None and step > self.done:
            span = (now - self.last) / (step - self.done)
            if values.get("val_loss") is None:
                self.recent.append(span)
            elif self.recent:
                self.validation = max(0.0, span - self._mean())
        again = step < self.done
        self.done, self.last = step, now
        self._note_limit(step, values, again)

    def _note_limit(self, step: int, values: Mapping[str, Any], again: bool) -> None:
        if values.get("seconds") is None:
            return
        self.trained = float(values["seconds"])
        if self.began is None or again:
            tokens, rate = values.get("tokens"), values.get("tokens_per_second")
            self.began = self.trained - (tokens / step / rate if tokens and rate else 0.0)

    def _mean(self) -> float:
        """Return the seconds of a usual step: one that an outage made long says nothing about those to come."""
        longest = OUTLIER * median(self.recent)
        return mean(span for span in self.recent if span <= longest)

    def left(self, now: float) -> float | None:
        """Return the seconds that are left; None: not known yet, or over."""
        if self.done >= self.steps or self.last is None:
            return None
        times = []
        if self.recent:
            left = self.steps - self.done
            coming = 1 + ((self.steps - 1) // self.validate_every - self.done // self.validate_every if self.validate_every else 0)
            under_way = min(now - self.last, self._mean())
            times.append(left * self._mean() + coming * (self.validation or 0.0) - under_way)
        if self.limit is not None and self.began is not None:
            times.append(max(0.0, self.limit - (self.trained - self.began) - (now - self.last)))
        return min(times) if times else None


def duration(seconds: float) -> str:
    """Write a time as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
