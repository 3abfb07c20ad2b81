"""Train a model: `thinwire train --config laptop --run runs/first`. The loop itself is in `run/trainer.py`."""

from __future__ import annotations

from typing import Any

from thinwire.cluster.launch import launch
from thinwire.metrics.news import tell
from thinwire.metrics.progress import Progress
from thinwire.metrics.trackers.open import open_trackers
from thinwire.pipeline.device import choose_device
from thinwire.pipeline.inprocess import build_pipeline
from thinwire.run.farewell import farewell, go_on_command, last_words
from thinwire.run.fork import fork
from thinwire.run.inputs import check_inputs
from thinwire.run.settings import TrainCommand, parse_train
from thinwire.run.stop import Abandoned, Stop
from thinwire.run.trainer import Trainer
from thinwire.util.lock import locked


def main(argv: list[str]) -> None:
    """Run the `train` verb."""
    command = parse_train(argv)
    with locked(command.run):
        train(command)


def train(command: TrainCommand) -> None:
    """Train, and say how it ended."""
    config = command.config
    check_inputs(config, command.run)
    if command.fork is not None:
        fork(command.fork, command.run, config)
    go_on = go_on_command("train", command.run)
    with farewell(command.run, go_on, config.replicas.count):
        if config.pipeline.mode == "workers":
            summary = launch(command)
        else:
            summary = train_here(command)
    if summary["val_loss"] is not None:
        print(f"validation loss {summary['val_loss']:.4f} after {summary['steps']} steps; {command.run / 'summary.json'}")
    if summary["val_loss"] is None or summary["steps"] < config.train.steps:
        print(last_words(summary, command.run, go_on, config.replicas.count))


def train_here(command: TrainCommand) -> dict:
    """Train all stages in this process; return the run's summary."""
    config, stop = command.config, Stop()
    with open_trackers(command.track, command.run, config, resume=command.resume) as curves, Progress.of(config) as progress:

        def report(event: dict[str, Any]) -> None:
            if text := tell(event):
                progress.say(text)

        stop.tell = progress.say
        pipeline = build_pipeline(config, choose_device(config.device))
        shown = [progress, *curves]
        trainer = Trainer(config, command.run, pipeline, resume=command.resume, trackers=shown, stop=stop, report=report)
        try:
            return trainer.run()
        except Abandoned:
            return trainer.end_early()
