"""Attach `memory/` to a pipeline where the run has a budget; nothing of it is imported where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.config.sections import RunConfig
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.protocols import Compute

if TYPE_CHECKING:
    from thinwire.memory.attach import MemoryBudget
    from thinwire.memory.blocks import Profile


def attach_budget(
    compute: Compute, optimizers: Sequence[StageOptimizer], config: RunConfig, folder: Path, profiles: Sequence[Profile]
) -> MemoryBudget | None:
    """Let the stages of this process run within their budget; `profiles` are what was measured of them before. None without one."""
    if config.memory.budget is None:
        compute.bound_in_flight(None)  # other workers may have one
        return None
    from thinwire.memory.attach import attach_memory  # not at the top

    return attach_memory(compute, optimizers, config, folder, profiles)
