"""What stages say about a step, and how it adds up. Free of links and torch: both kinds of pipeline use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

EVALUATION = -1
"""Number of an outcome that belongs to no step but to an evaluation."""


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
    uncopied: tuple[int, ...] = ()
    """Steps of which a keeper could not write the copy: it waits for a newer one."""
    save: bool = False
    """Whether a checkpoint is wanted after this step, besides the regular ones."""
    replicas: int = 1
    """How many replicas it is the total of."""
    stopper: int = -1
    """The number of a worker that wants to stop; -1: nobody does."""
    timed_out: bool = False
    """Whether it wants to because its time limit is reached."""

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
            tuple(sorted({*self.uncopied, *downstream.uncopied})),
            self.save or downstream.save,
            stopper=self.stopper if self.stop else downstream.stopper,
            timed_out=self.timed_out if self.stop else downstream.timed_out,
        )

    def beside(self, other: Outcome) -> Outcome:
        """Add what other replicas have said: the mean of the losses, and this one's own norm."""
        if other.step != self.step or self.loss is None or other.loss is None:
            raise ValueError(f"outcome of step {other.step} beside one of step {self.step}; the replicas have lost step")
        together = self.replicas + other.replicas
        return replace(
            self.plus(other),
            loss=(self.loss * self.replicas + other.loss * other.replicas) / together,
            squared_norm=self.squared_norm,
            replicas=together,
        )

    def of_replica(self, own: Outcome) -> Outcome:
        """Return the total as one replica applies it: with the norm of its own gradients."""
        return replace(self, squared_norm=own.squared_norm)

    def alone(self) -> Outcome:
        """Return the outcome of a replica that meets no other at this step: it neither stops nor concerns itself with checkpoints."""
        return replace(self, stop=False, saved=(), copied=(), uncopied=(), save=False, stopper=-1, timed_out=False)

    @cached_property
    def norm(self) -> float:
        return math.sqrt(self.squared_norm) if self.squared_norm >= 0 else math.nan


def of_replica(everyone: Sequence[Any], replica: int, stages: int) -> list[Any]:
    """Choose what the stages of one replica say among what all workers say; one that speaks for all its stages is alone."""
    return list(everyone[replica * stages : (replica + 1) * stages])
