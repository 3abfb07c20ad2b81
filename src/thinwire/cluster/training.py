"""Train on this machine, in this process or in workers: what is the same for the verb `train` and the Python API."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from io import StringIO
from typing import Any

from thinwire.cluster.launch import launch
from thinwire.config.options import CHOSEN
from thinwire.config.sections import RunConfig
from thinwire.metrics.news import tell
from thinwire.metrics.progress import Progress
from thinwire.metrics.track import Tracker
from thinwire.metrics.trackers.open import open_trackers
from thinwire.run.command import TrainCommand
from thinwire.run.fork import fork
from thinwire.run.here import train_here
from thinwire.run.inputs import check_inputs
from thinwire.run.stop import Stop
from thinwire.util.lock import locked


def train_on_this_machine(command: TrainCommand, *, trackers: Sequence[Tracker] = (), shown: bool = True) -> dict[str, Any]:
    """Train, and keep other processes out of the run folder meanwhile; return the summary. `shown`: tell people on standard output."""
    config, workers = command.config, command.config.pipeline.mode == "workers"
    if workers:
        refuse_unknown_to_workers(config)
    with locked(command.run):
        check_inputs(config, command.run)
        if command.fork is not None:
            fork(command.fork, command.run, config)
        return launch(command, trackers=trackers, shown=shown) if workers else train_shown(command, trackers, shown)


def train_shown(command: TrainCommand, trackers: Sequence[Tracker], shown: bool) -> dict[str, Any]:
    """Train in this process, with what people see of it."""
    config, stop = command.config, Stop()
    with (
        open_trackers(command.track, command.run, config, resume=command.resume) as curves,
        Progress.of(config, stream=None if shown else StringIO()) as progress,
    ):

        def report(event: dict[str, Any]) -> None:
            if text := tell(event):
                progress.say(text)

        stop.tell = progress.say
        return train_here(config, command.run, resume=command.resume, trackers=[progress, *curves, *trackers], stop=stop, report=report)


def refuse_unknown_to_workers(config: RunConfig) -> None:
    """Raise ValueError for what only this process, or only its main thread, can do."""
    script = hasattr(sys.modules["__main__"], "__file__")  # which workers import again, and what it registers with it
    for section, registry in CHOSEN.items():
        name = getattr(config, section).name
        if name in registry.registered and name not in registry.importable() and not script:
            raise ValueError(
                f"the {section} {name!r} is defined in this session alone, and pipeline.mode is workers; set pipeline.mode to inprocess, "
                "or write it into a module that can be imported, and register it from there"
            )
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("workers can be started from the main thread alone; set pipeline.mode to inprocess, or train in the main thread")
