"""In which order a stage runs its microbatches: GPipe, interleaved 1F1B, or 1F1B deep enough to hide the link's latency.

The depth schedule needs torch's schedule runtime, whose names are private; they are used in this file alone, and without them the
interleaved schedule takes its place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

from thinwire.pipeline.order import compute_order

try:
    from torch.distributed.pipelining.schedules import (
        _Action,
        _ComputationType,
        _PipelineScheduleRuntime,
    )
except ImportError:  # another torch: only the public schedules
    _PipelineScheduleRuntime = None  # type: ignore[assignment,misc]

ScheduleName = Literal["gpipe", "1f1b", "depth"]
LossFunction = Callable[[Tensor, Tensor], Tensor]


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
    if name in ("gpipe", "1f1b") or _PipelineScheduleRuntime is None:
        raise ValueError(
            f"memory.budget bounds the microbatches in flight, and the schedule {name} does not let it (auto and depth need torch 2.9 or "
            "later); leave --pipeline.schedule at auto, or leave --memory.budget out"
        )


def make_schedule(name: ScheduleName, stage: PipelineStage, microbatches: int, in_flight: Sequence[int], loss: LossFunction):
    """Make the schedule object of one stage; it is dirty after an exception, so make another then."""
    # torch prints the whole schedule for every exception it passes on; that a link has failed is said by the link.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    if name == "gpipe":
        return ScheduleGPipe(stage, microbatches, loss_fn=loss, scale_grads=False)
    if name == "1f1b" or _PipelineScheduleRuntime is None:
        return ScheduleInterleaved1F1B([stage], microbatches, loss_fn=loss, scale_grads=False)
    return _depth_schedule(stage, microbatches, in_flight, loss)


def _depth_schedule(stage: PipelineStage, microbatches: int, in_flight: Sequence[int], loss: LossFunction):
    """Put our own order of actions into torch's schedule runtime."""
    schedule = _PipelineScheduleRuntime([stage], microbatches, loss_fn=loss, scale_grads=False)
    kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
    order: dict[int, list[_Action | None]] = {
        index: [_Action(index, kinds[kind], microbatch) for kind, microbatch in compute_order(depth, microbatches)]
        for index, depth in enumerate(in_flight)
    }
    schedule._prepare_schedule_with_comms(order)
    return schedule
