"""When checkpoints are written, which of them stay, and of which a neighbour gets a copy.

All stages decide by the same outcome of a step, so all write, keep and copy the same steps. Writing itself is `checkpoint/saver.py`'s job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire import checkpoint
from thinwire.checkpoint import Position
from thinwire.config.sections import RunConfig
from thinwire.link.errors import ProtocolError
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.outcome import Outcome
from thinwire.pipeline.protocols import Backups
from thinwire.util.disk import shortage
from thinwire.util.notices import say_aloud, warn
from thinwire.util.runtime import REAL, Runtime

FIRST_STEPS = 10
FIRST_SECONDS = 60.0
"""The first checkpoint of a run comes after so many steps or so much training, unless a regular one comes before."""


class Keeper:
    """The checkpoints of one process of a run."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        stages: Sequence[Stage],
        facts: dict[str, Any],
        backups: Backups | None = None,
        confirmed: int = -1,
        runtime: Runtime = REAL,
    ) -> None:
        """Keep checkpoints in a run folder; `confirmed` is a step of which all stages are known to have had one.

        `backups`: neighbours keep copies of each other's, for stages on different machines.
        """
        self.every, self.folder, self.facts, self.backups = config.train.checkpoint_every, folder, facts, backups
        self.at_once = config.memory.budget is not None
        indices = [stage.plan.index for stage in stages]
        self.saver = checkpoint.Saver(folder, indices, facts, alone=config.replicas.count == 1, runtime=runtime)
        self.confirmed, self.offered = confirmed, -1
        self.kept: tuple[int, ...] = ()
        """Steps whose checkpoints were last said to stay."""
        self.problem: str | None = None
        self.saved = 0
        """Periods of `checkpoint_every` that a checkpoint was taken for."""
        self.begun = False
        """Whether the run has a checkpoint, or one was tried."""

    def begin(self, position: Position, restored: Path | None) -> None:
        """Begin where the run goes on, from a checkpoint that all stages have or from the beginning."""
        self.saved, self.begun = self._period(position.step), restored is not None
        if restored is not None:
            self.confirmed = max(self.confirmed, position.step)
            if self.backups is not None:
                self.backups.offer(restored.name)
        self.saver.everyone = self.confirmed

    def forget_newer(self, position: Position, restored: Path | None, *, must: bool) -> None:
        """Delete what this process has of later steps, once all have taken what they go on from: nobody can vote for it any more.

        Raise ValueError if it `must` be deleted and cannot.
        """
        try:
            checkpoint.remove_newer(self.folder, self.saver.indices, position, self.facts, restored)
        except OSError as error:
            place = self.folder / "checkpoints"
            problem = f"checkpoints in {self.folder} behind step {position.step}, from which the run goes on, were not deleted"
            if must:
                raise ValueError(f"{problem}: {shortage(place, error)}, or delete them") from None
            warn(f"{problem}: {shortage(place, error)}")

    @property
    def speaks(self) -> bool:
        """Tell whether this process is the one of its run folder that tells people, and writes, what concerns the folder as a whole."""
        return self.backups is not None or 0 in self.saver.indices

    def held(self) -> dict[str, list[str]]:
        """List the neighbours' checkpoints that are kept here."""
        return {} if self.backups is None else self.backups.held()

    def fetch(self, name: str, mine: Sequence[str], votes: Sequence[dict[str, Any]]) -> None:
        """Get the checkpoint that all have voted for from a neighbour where it is missing here; `mine` are this process's own."""
        if self.backups is not None:
            self.backups.fetch(name, votes)
        elif name not in mine:
            raise ProtocolError("vote", name, "a checkpoint that this process has, for no neighbour keeps copies")

    def speak(self, seconds: float) -> dict[str, Any]:
        """Return what this process says of a step for its checkpoints: what is on its disk, after so many seconds of training.

        Whoever has trained for long enough to want a first checkpoint tells all others.
        """
        late = bool(self.every) and not self.begun and seconds >= FIRST_SECONDS
        saved = self.saver.written
        if self.backups is None:
            return {"save": late, "saved": saved, "copied": saved}  # where there are no copies none is missing
        return {"save": late, "saved": saved, "copied": self.backups.copied(saved), "uncopied": self.backups.uncopied()}

    def _period(self, step: int) -> int:
        return step // self.every if self.every else 0

    def is_due(self, step: int, outcome: Outcome | None) -> bool:
        """Tell whether a checkpoint is to be taken after so many steps, the last of which had this outcome."""
        first = bool(self.every) and not self.begun and (step >= FIRST_STEPS or (outcome is not None and outcome.save))
        return first or self._period(step) > self.saved

    def save(
        self, stages: Sequence[Stage], optimizers: Sequence[StageOptimizer], position: Position, exchange: Mapping[str, Tensor]
    ) -> None:
        """Take a snapshot; it is written while training goes on, or with a memory budget at once: it needs no copy then."""
        self.saved, self.begun = self._period(position.step), True
        self.saver.save(stages, optimizers, position, exchange, at_once=self.at_once)
        for optimizer in optimizers if self.at_once else ():
            optimizer.put_away()  # a validation may come next

    def keep(self, outcome: Outcome, position: Position) -> None:
        """Keep the newest two checkpoints that everyone has, and those that copies are of; offer the next copy; say what went wrong.

        On a slow line a copy may take longer than the time between checkpoints, and copies of different steps would be worth nothing. So
        two more may stay: the newest of which every keeper has a copy, the only one that survives the loss of a machine, and the one
        whose copies are under way.
        """
        safe, newest = max(outcome.copied, default=-1), max(outcome.saved, default=-1)
        if safe > self.confirmed:
            self.confirm(safe)
        if newest > self.offered and self.offered in (-1, *outcome.copied, *outcome.uncopied):
            self.offered = newest
            if self.backups is not None:
                self.backups.offer(checkpoint.checkpoint_folder(self.folder, replace(position, step=newest), self.facts).name)
        if self.saver.problem != self.problem:
            self.tell()
        needed = (*sorted(outcome.saved)[-2:], self.confirmed, self.offered)
        if outcome.saved and needed != self.kept:
            self.kept = needed
            self.saver.confirm(newest, needed)

    def confirm(self, step: int) -> None:
        """Note that everyone has a checkpoint of this step, and every keeper a copy."""
        self.confirmed = self.saver.everyone = step
        if self.backups is not None:
            self.backups.confirm(step)

    def tell(self) -> None:
        """Warn of a checkpoint that was not written, once."""
        self.problem = self.saver.problem
        if self.problem is not None:
            warn(f"{self.problem}, and the next one tries again")

    def finish(self) -> str | None:
        """Wait until the last snapshot is on the disk; return why it is not."""
        try:
            self.saver.flush()
        except ValueError as error:
            return f"{error}; when that is mended, --resume goes on from it"
        return None

    def copied(self, steps: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of some steps whose copies are where they belong; where there are none, none is missing."""
        return steps if self.backups is None else self.backups.copied(steps)

    def copy_last(self, position: Position) -> None:
        """Have copies made of the last checkpoint, which all stages have, and wait for them."""
        if self.backups is None:
            return
        folder = checkpoint.checkpoint_folder(self.folder, position, self.facts)
        size = sum(path.stat().st_size for path in folder.glob("stage-*"))
        text = f"neighbours get copies of the last checkpoint, {size / 1e6:.1f} MB; Ctrl-C twice leaves them out"
        say_aloud(f"thinwire: {text}")
        self.backups.copy_last(folder.name)
