"""The depth schedule of one stage, as the engine runs it and the memory planner simulates it. Free of torch."""

from __future__ import annotations


def compute_order(depth: int, microbatches: int) -> list[tuple[str, int]]:
    """Return one stage's order of forwards and backwards with at most `depth` microbatches in flight."""
    order = [("F", index) for index in range(depth)]
    for index in range(microbatches):
        order.append(("B", index))
        if depth + index < microbatches:
            order.append(("F", depth + index))
    return order
