"""Attach `memory/` to a training that has a budget; nothing of it is imported where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.run.state import Training

if TYPE_CHECKING:
    from thinwire.memory.attach import MemoryBudget
    from thinwire.memory.blocks import Profile


def attach_budget(training: Training, profiles: Sequence[Profile]) -> MemoryBudget:
    """Let the stages of this process run within their budget; `profiles` are what was measured of them before."""
    from thinwire.memory.attach import attach_memory  # not at the top

    return attach_memory(training.compute, training.optimizers, training.config, training.folder, profiles)
