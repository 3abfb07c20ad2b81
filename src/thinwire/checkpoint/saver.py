"""Snapshots beside the training: `save` copies the tensors and returns, a thread of its own writes them and deletes old ones.

A thread lives only while there is something to do, and is no daemon: the interpreter waits for it at exit, so no write is lost and
none is waited for in vain. A full or broken disk does not stop the training: `problem` says what is wrong, and the next snapshot
tries again. Nothing is deleted before `confirm` has said that every worker has a newer one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor

from thinwire.checkpoint.layout import Position, checkpoint_folder
from thinwire.checkpoint.writing import Part, part_of, prune, write_parts
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.util.disk import shortage
from thinwire.util.runtime import REAL, Runtime


@dataclass(frozen=True)
class Snapshot:
    """The parts of the stages of this process at one step, in memory of their own."""

    position: Position
    parts: list[Part]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


class Saver:
    """Write the checkpoints of the stages of one process; at most one snapshot is being written and one waits."""

    def __init__(self, run: Path, indices: Sequence[int], facts: dict[str, Any], *, alone: bool = True, runtime: Runtime = REAL) -> None:
        """Write into a run folder; where no other process has a part, or a replica, of the run (`alone`) nobody needs to confirm."""
        self.run, self.indices, self.facts = run, list(indices), facts
        self._alone = alone and len(self.indices) == len(facts["split"].split(","))
        self.everyone = -1
        """Newest step of which every worker is known to have a checkpoint; each one says so in its manifest."""
        self._runtime, self._state = runtime, runtime.condition()
        self._waiting: Snapshot | None = None
        self._confirmed: tuple[Position, Collection[int]] | None = None
        """A position that every worker has and the steps to spare, until what is older has been deleted."""
        self._thread: Thread | None = None
        self._last_thread: Thread | None = None
        self._newest: int | None = None
        self._written: list[int] = []
        self._problem: str | None = None
        self._before = ""
        self._closed = False

    @property
    def newest(self) -> int | None:
        """Return the newest step that this saver has brought to the disk; None before the first."""
        with self._state:
            return self._newest

    @property
    def written(self) -> tuple[int, ...]:
        """Return the steps that this saver has brought to the disk and not deleted again, oldest first."""
        with self._state:
            return tuple(self._written)

    @property
    def problem(self) -> str | None:
        """Say why the last snapshot was not written; None if it was."""
        with self._state:
            return self._problem

    def save(
        self,
        stages: Sequence[Stage],
        optimizers: Sequence[StageOptimizer],
        position: Position,
        exchange: Mapping[str, Tensor] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Copy weights, buffers and optimizer state, and have them written; a snapshot that still waits gives way to this one.

        `exchange` is what the stage of this process keeps of its exchange with other replicas. `at_once` makes no copy, and waits until
        all is written: where there is no memory for a copy.
        """
        assert not self._closed, "save after close"
        assert [stage.plan.index for stage in stages] == self.indices, "other stages than this saver's"
        with self._state:
            self._before = position.before
            self._waiting = None  # before the copy: never more than two snapshots in memory
        parts = [
            part_of(stage, optimizer, position, self.facts, copy=not at_once, exchange=exchange, everyone=self.everyone)
            for stage, optimizer in zip(stages, optimizers, strict=True)
        ]
        with self._state:
            self._waiting = Snapshot(position, parts)
            self._start()
            if at_once:
                self._state.wait_for(lambda: self._thread is None)

    def place(self, step: int) -> Path:
        """Return the folder of a step in the present stretch of the run: that of the last position that was given to `save`."""
        with self._state:
            return checkpoint_folder(self.run, Position(step, 0.0, self._before), self.facts)

    def confirm(self, step: int, spare: Collection[int] = ()) -> None:
        """Note that every worker has a checkpoint of this step on its disk: have this process's parts that are older deleted.

        Those of the steps in `spare` stay, or else one before it, should a disk damage it.
        """
        with self._state:
            if self._newest is None or self._newest < step:
                return  # not even ours is there: nothing is safe to delete
            self._written = [each for each in self._written if each >= step or each in spare]
            self._confirmed = Position(step, 0.0, self._before), spare
            self._start()

    def flush(self) -> None:
        """Wait until nothing waits, or is being written or deleted; raise ValueError if the last snapshot was not written."""
        with self._state:
            self._state.wait_for(lambda: self._thread is None)
            if self._problem is not None:
                raise ValueError(self._problem)

    def close(self) -> None:
        """Wait for what is being written and for what waits, and for the thread to end."""
        with self._state:
            self._closed = True
        if self._last_thread is not None:
            self._last_thread.join()

    def _start(self) -> None:
        """See that someone does what waits; the caller holds the lock."""
        if self._thread is None:
            self._thread = self._last_thread = self._runtime.thread("thinwire-saver", self._work, daemon=False)
            self._thread.start()

    def _work(self) -> None:
        """Delete and write until nothing waits."""
        while True:
            with self._state:
                confirmed, self._confirmed = self._confirmed, None
                snapshot, self._waiting = self._waiting, None
                if snapshot is None and confirmed is None:
                    self._thread = None
                    self._state.notify_all()
                    return
            if confirmed is not None:  # before the next one needs the room
                self._delete_older(*confirmed)
            if snapshot is not None:
                self._keep(snapshot)
            snapshot = None  # let the memory go before the next one is waited for

    def _delete_older(self, position: Position, spare: Collection[int]) -> None:
        """Delete what nobody needs once every worker has a checkpoint of this position."""
        with suppress(OSError):  # what stays too long does no harm; a disk that fails shows when the next one is written
            prune(self.run, self.indices, checkpoint_folder(self.run, position, self.facts), spare)

    def _keep(self, snapshot: Snapshot) -> None:
        """Write a snapshot and take note of it, or of what went wrong."""
        problem, step = self._write(snapshot), snapshot.position.step
        with self._state:
            self._problem = problem
            if problem is None:
                self._newest = step
                self._written = [*(each for each in self._written if each != step), step]
        if self._alone and problem is None:
            self.everyone = step
            self.confirm(step)

    def _write(self, snapshot: Snapshot) -> str | None:
        """Write a snapshot; return what went wrong."""
        folder = checkpoint_folder(self.run, snapshot.position, self.facts)
        try:
            write_parts(folder, snapshot.parts)
        except Exception as error:  # whatever it was: training goes on, and the last good checkpoint stays
            return (
                f"the checkpoint of step {snapshot.position.step} was not written to {folder}: {shortage(folder, error, snapshot.size)}. "
                "The last complete one is untouched"
            )
        return None
