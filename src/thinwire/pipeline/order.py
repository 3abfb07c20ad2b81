"""The order in which one stage runs its microbatches, as the engines run it and the memory planner simulates it. Free of torch."""

from __future__ import annotations

from typing import Literal

Action = tuple[Literal["F", "B"], int]
"""The forward or the backward of a microbatch."""


def compute_order(depth: int, microbatches: int) -> list[Action]:
    """Return one stage's order of forwards and backwards with at most `depth` microbatches in flight."""
    order: list[Action] = [("F", index) for index in range(depth)]
    for index in range(microbatches):
        order.append(("B", index))
        if depth + index < microbatches:
            order.append(("F", depth + index))
    return order


def fixed_depth(schedule: str, stage: int, stages: int, microbatches: int) -> int | None:
    """Return how many microbatches a stage keeps in flight in a schedule that does not ask how long the links take; None: it does."""
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b":  # torch's interleaved schedule warms up twice as long as needed
        return min(microbatches, 2 * (stages - 1 - stage) + 1)
    return None
