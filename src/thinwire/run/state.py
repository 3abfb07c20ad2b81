"""What one process of a run holds: its stages and their optimizers, the others, the run folder, and where the run is.

Building it talks to nobody. `agree.py` makes it ready together with all others, `trainer.py` trains with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from thinwire.checkpoint import Position
from thinwire.config.sections import RunConfig
from thinwire.data.open import Data
from thinwire.metrics.news import Report, ignore
from thinwire.metrics.track import Tracker
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.outcome import Outcome
from thinwire.pipeline.protocols import Backups, Compute, Group
from thinwire.replicas import exchange
from thinwire.run.keeping import Keeper
from thinwire.run.stop import Stop
from thinwire.util.runtime import REAL, Runtime

if TYPE_CHECKING:
    from thinwire.memory.attach import MemoryBudget

State = Literal["whole", "ready", "committing"]
"""Of the weights. `whole`: they are those after `position.step` steps. `ready`: so they are, and all gradients of the step under way are
there; others may have committed it. `committing`: some of weights, basis and shared parameters are of the next step already, and what is
here belongs to none."""


class Training:
    """The state of one process of a run."""

    keeper: Keeper
    """The checkpoints, from when all have agreed on the data."""
    data: Data | None = None
    """On first stages."""
    validation_BT1: Tensor | None = None
    validation_rows = 0
    memory: MemoryBudget | None = None
    """What keeps the stages within their budget, if there is one."""
    first_step_seconds = 0.0
    state: State = "whole"
    outcome: Outcome | None = None
    """Outcome of the last step that was committed."""
    rate = 0.0
    """Learning rate of that step."""
    doing = "start"
    """What this process is about, for whoever watches whether it gets on."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        compute: Compute,
        group: Group,
        *,
        backups: Backups | None = None,
        trackers: Sequence[Tracker] = (),
        stop: Stop | None = None,
        report: Report = ignore,
        runtime: Runtime = REAL,
    ) -> None:
        """Build everything; `trackers` are shown each step, beside the metrics file, and closed by whoever made them.

        `backups` are for a process that has a machine, and its run folder, to itself. `report` takes what people should know.
        `runtime` is the clock that steps are timed by.
        """
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        self.config, self.folder, self.compute, self.group, self.backups = config, folder, compute, group, backups
        self.trackers, self.stop, self.report, self.runtime = trackers, stop or Stop(), report, runtime
        self.optimizers = [StageOptimizer(stage, config.train) for stage in compute.stages]
        self.replicated = self.optimizers if config.replicas.count > 1 else []
        """The optimizer of the one stage that has copies in other replicas."""
        trained: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            trained |= optimizer.named
        self.exchange = exchange.make_exchange(config, group.peers, trained)
        self.share = config.replica_batch
        """Sequences of a step that are this replica's."""
        first, last = compute.stages[0].plan, compute.stages[-1].plan
        self.has_first = first.first
        """Whether the first stage is here."""
        self.metrics_path = folder / "metrics" / f"stage-{'all' if first.first and last.last else first.index}.jsonl"
        self.position = self.started_at = Position(step=0, seconds=0.0)

    @property
    def together(self) -> bool:
        """Tell whether the replicas have just met: between meetings they differ, and are not at the same step."""
        return self.position.step == 0 or self.exchange.meets(self.position.step - 1)

    def save(self) -> None:
        """Take a snapshot."""
        before, self.doing = self.doing, "checkpoint"
        self.keeper.save(self.compute.stages, self.optimizers, self.position, self.exchange.state)
        self.doing = before
