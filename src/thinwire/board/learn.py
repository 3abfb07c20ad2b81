"""Learning rows: what a spec learns from a seed, trained in one process. A run that was interrupted goes on where it was."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from thinwire import __version__, checkpoint
from thinwire.board.cases import Case
from thinwire.board.rows import Row, read_lines, refuse_difference, settings_of, write_row
from thinwire.config.sections import RunConfig
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.metrics.progress import Progress
from thinwire.metrics.track import JsonLines, Tracker
from thinwire.pipeline.device import choose_device
from thinwire.pipeline.inprocess import Pipeline, build_pipeline
from thinwire.run.stop import Abandoned
from thinwire.run.trainer import Trainer
from thinwire.util.checkpoint_name import checkpoint_name
from thinwire.util.lock import locked


class TrafficLog(Tracker):
    """Keep what has crossed each boundary so far, so that a resumed run counts on instead of anew."""

    def __init__(self, folder: Path, pipeline: Pipeline, resumed: int) -> None:
        self.meters = pipeline.traffic.boundaries
        path = folder / "metrics" / "traffic.jsonl"
        self.lines = JsonLines(path, resumed=resumed)
        for line in read_lines(path)[-1:]:
            for meter, counts in zip(self.meters, line["boundaries"], strict=True):
                for name, number in counts.items():
                    setattr(meter, name, number)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.lines.log(step, {"boundaries": [meter.counts() for meter in self.meters]})

    def close(self) -> None:
        self.lines.close()


def finished(folder: Path, config: RunConfig, ignored: frozenset[str] = frozenset()) -> Row | None:
    """Return the summary of a run that has done all its steps; refuse the folder if it is a run of other settings."""
    if (folder / CONFIG_FILE).exists():
        made_with = settings_of(read_config(folder / CONFIG_FILE))
        refuse_difference(folder, made_with, config, "remove that run to train it again", ignored)
    if not (folder / "summary.json").exists():
        return None
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary if summary["steps"] == config.train.steps else None


def resumable(folder: Path, config: RunConfig) -> int:
    """Return the step from which an unfinished run can go on, all replicas together; 0: none."""
    replicas = [folder, *(folder / f"replica-{number}" for number in range(1, config.replicas.count))]
    for each in replicas:
        # A run that ended between its last checkpoint and its summary does its last steps again: there is no step left to resume at.
        shutil.rmtree(each / "checkpoints" / checkpoint_name(config.train.steps), ignore_errors=True)
    return max(set.intersection(*(set(map(checkpoint.step_of, checkpoint.complete(each))) for each in replicas)), default=0)


def train(config: RunConfig, folder: Path) -> Row:
    """Train to the end, from the start or from where an earlier try stopped; return the summary."""
    with ExitStack() as stack:
        stack.enter_context(locked(folder, "--out"))
        resume = resumable(folder, config) > 0
        pipeline = build_pipeline(config, choose_device(config.device))
        trackers: list[Tracker] = [stack.enter_context(Progress(config.train.steps))] if sys.stdout.isatty() else []
        trainer = Trainer(config, folder, pipeline, resume=resume, trackers=trackers)
        # The trainer knows only now from which step it goes on; it holds this very list.
        trackers.append(stack.enter_context(TrafficLog(folder, pipeline, trainer.position.step)))
        try:
            summary = trainer.run()
        except Abandoned:
            summary = trainer.end_early()
    refuse_unfinished(summary, config)
    return summary


def refuse_unfinished(summary: Row, config: RunConfig) -> None:
    """Stop everything where a training was stopped, be it in its last validation."""
    if summary["val_loss"] is None or summary["steps"] < config.train.steps:
        raise KeyboardInterrupt


def curve(metrics: Path, summary: Row) -> dict[int, float]:
    """Return the validation losses by step: those on the way and the final one."""
    found = {line["step"]: line["val_loss"] for line in read_lines(metrics) if "val_loss" in line} | {summary["steps"]: summary["val_loss"]}
    if bad := [step for step, loss in found.items() if loss is None or not math.isfinite(loss)]:
        raise ValueError(
            f"the validation loss after step {bad[0]} is not a number: this training cannot be scored; try a lower --train.rate"
        )
    return found


def learn(case: Case, seed: int, path: Path) -> Row:
    """Make a learning row."""
    config, folder = case.learning(seed), case.runs / case.name(seed)
    summary = finished(folder, config, case.immaterial) or train(config, folder)
    sent = {f"bytes_per_token_{way}": summary[f"bytes_per_token_{way}"] for way in ("forward", "backward")}
    return write_learnt(path, case, seed, config, summary, sent, folder / "metrics" / "stage-all.jsonl")


def write_learnt(path: Path, case: Case, seed: int, config: RunConfig, summary: Row, sent: Row, metrics: Path) -> Row:
    """Put a learning row in place: what its run says, what it `sent`, and its curve."""
    row = {
        "spec": case.spec.text,
        "seed": seed,
        "command": case.command(config),
        "steps": summary["steps"],
        "tokens": summary["tokens"],
        "val_loss": summary["val_loss"],
        "trainable_parameters": summary["trainable_parameters"],
        **sent,
        "curve": curve(metrics, summary),
        "thinwire": __version__,
        "torch": torch.__version__,
    }
    return write_row(path, config, row)
