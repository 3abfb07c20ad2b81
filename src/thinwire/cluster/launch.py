"""Train with one worker process per stage and replica on this machine: `thinwire train --pipeline.mode workers`.

Replica 0 keeps its checkpoints and metrics in the run folder itself, where `eval`, `export` and `generate` look for a model; the others
in `replica-1`, `replica-2`, ... inside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire import checkpoint
from thinwire.cluster.membership import Membership
from thinwire.cluster.recover import train_stage
from thinwire.cluster.supervisor import run_workers
from thinwire.cluster.worker_process import Say
from thinwire.link.peer import WorkerId
from thinwire.metrics.track import Tracker
from thinwire.metrics.trackers.open import open_trackers
from thinwire.metrics.view import RunView
from thinwire.run.command import TrainCommand
from thinwire.run.folder import folder_of, kept_by_all, summarised, write_summary
from thinwire.run.stop import Stop


def launch(command: TrainCommand, *, trackers: Sequence[Tracker] = (), shown: bool = True) -> dict[str, Any]:
    """Train with one process per stage, `shown` to people or not; return the run's summary."""
    with (
        open_trackers(command.track, command.run, command.config, resume=command.resume) as named,
        RunView(command.config, [*named, *trackers], shown=shown) as view,
    ):

        def show(worker_id: WorkerId, message: dict[str, Any]) -> None:
            if "step" in message:
                view.log(worker_id, message["step"], message["values"])
            else:
                view.event(worker_id, message)

        arguments = {"run": str(command.run), "resume": command.resume}
        results = run_workers(train_worker, command.config, arguments, show, replacing={"replacing": True})
    config = command.config
    summary: dict[str, Any] = results[0] if results else {"val_loss": None}
    if len(results) < config.replicas.count * config.pipeline.stages:  # some were lost when all were asked to end
        summary |= {"steps": max(map(checkpoint.step_of, kept_by_all(command.run, config.replicas.count)), default=0)}
    if summary["val_loss"] is not None and summarised(command.run) < summary["steps"]:  # stage 0 was lost when only this was left to do
        write_summary(command.run, summary)
    return summary


def train_worker(member: Membership, say: Say, stop: Stop, run: str, resume: bool, replacing: bool = False) -> dict[str, Any]:
    """Train one stage and tell the supervisor of every step, and of what happens to the links."""
    folder = folder_of(Path(run), member.replica)
    return train_stage(
        member,
        folder,
        resume=resume,
        replacing=replacing,
        trackers=[PipeTracker(say)],
        stop=stop,
        report=say,
        stuck=lambda why: say({"failed": why}),
    )


class PipeTracker(Tracker):
    """Tell the supervisor about every step."""

    def __init__(self, say: Say) -> None:
        self.say = say

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.say({"step": step, "values": dict(values)})
