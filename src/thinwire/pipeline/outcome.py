"""What stages say about a step, and how it adds up. Free of links and torch: both kinds of pipeline use it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What one stage, or all of them, say about a step."""

    step: int
    loss: float | None
    """Known to the last stage, and to all in the total."""
    squared_norm: float
    stop: bool = False
    turn_seconds: float = 0.0
    """Longest time of one microbatch at any stage, forward and backward, or on any line."""
    delay_seconds: float = 0.0
    """Longest one-way time of a payload on any link: latency and transmission."""

    saved: tuple[int, ...] = ()
    """Steps of which this stage, or every one of them, has a checkpoint on its disk."""
    copied: tuple[int, ...] = ()
    """Those of them of which whoever keeps a copy for a neighbour has it too: they survive the loss of a machine."""

    def plus(self, downstream: Outcome) -> Outcome:
        """Add what the stages behind this one have said. The order of the sum is fixed: from the last stage to the first."""
        if downstream.step != self.step:
            raise ValueError(f"outcome of step {downstream.step} where step {self.step} ends; the stages have lost step")
        loss = self.loss if downstream.loss is None else downstream.loss
        return Outcome(
            self.step,
            loss,
            self.squared_norm + downstream.squared_norm,
            self.stop or downstream.stop,
            max(self.turn_seconds, downstream.turn_seconds),
            max(self.delay_seconds, downstream.delay_seconds),
            tuple(step for step in self.saved if step in downstream.saved),
            tuple(step for step in self.copied if step in downstream.copied),
        )

    @property
    def norm(self) -> float:
        return math.sqrt(self.squared_norm) if self.squared_norm >= 0 else math.nan
