"""How many microbatches each stage keeps in flight: deep enough to hide the link's latency, as few as memory asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

ScheduleName = Literal["gpipe", "1f1b", "depth"]


def depths(stages: int, microbatches: int, delay: float = 0.0, compute: float = 1.0) -> list[int]:
    """Return how many microbatches each stage keeps in flight so that a one-way delay (latency and frame time) is hidden.

    Stage r of S: (S - r) + (S - 1 - r) ceil(2 delay / compute), where `compute` is forward plus backward of one microbatch, or its
    transmission where the line is slower. Rounded up hop by hop: two busy neighbours alternate forwards and backwards in step, so the
    way there and back takes a whole number of turns.
    """
    turns = math.ceil(min(microbatches, 2 * delay / max(compute, 1e-9)))  # more would change nothing
    return [min(microbatches, (stages - stage) + (stages - 1 - stage) * turns) for stage in range(stages)]


def within(in_flight: Sequence[int], limits: Sequence[int | None]) -> list[int]:
    """Return how many microbatches each stage keeps in flight where some can hold only so many.

    A stage must not wait for more forwards than the one before it does before its first backward: its limit holds for all behind it.
    """
    least = math.inf
    found = []
    for depth, limit in zip(in_flight, limits, strict=True):
        least = min(least, math.inf if limit is None else limit)
        found.append(int(min(depth, least)))
    return found


def check_bounded(name: str) -> None:
    """Refuse a schedule whose microbatches in flight cannot be bounded."""
    if name in ("gpipe", "1f1b"):
        raise ValueError(
            f"memory.budget bounds the microbatches in flight, and the schedule {name} does not let it; leave --pipeline.schedule at auto, "
            "or leave --memory.budget out"
        )
