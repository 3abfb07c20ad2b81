"""Train all stages in this process: what the verb `train`, the Python API and `compare` do in the mode `inprocess`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from thinwire.config.sections import RunConfig
from thinwire.metrics.news import Report, ignore
from thinwire.metrics.track import Tracker
from thinwire.pipeline.alone import GroupAlone
from thinwire.pipeline.inprocess import build_pipeline
from thinwire.run.agree import Start, agree
from thinwire.run.stop import Stop
from thinwire.run.trainer import Trainer
from thinwire.util.device import choose_device

Begin = Callable[[Trainer], Sequence[Tracker]]
"""Called when the trainer knows from which step it goes on; returns further trackers, which are closed with the run."""


def train_here(
    config: RunConfig,
    run: Path,
    *,
    resume: bool = False,
    trackers: Sequence[Tracker] = (),
    stop: Stop | None = None,
    report: Report = ignore,
    begin: Begin = lambda trainer: (),
) -> dict[str, Any]:
    """Train, or go on with a run; return its summary. Trackers are closed by whoever made them, those of `begin` here."""
    with ExitStack() as stack:
        pipeline = build_pipeline(config, choose_device(config.device))
        shown = list(trackers)
        trainer = Trainer(config, run, pipeline, GroupAlone(), trackers=shown, stop=stop, report=report)
        agree(trainer, Start(resume=resume))
        shown += [stack.enter_context(tracker) for tracker in begin(trainer)]  # the trainer holds this very list
        return trainer.run()
