"""Make rows: what a spec learns from a seed, how long its steps take over a link, and a whole training over it. All of it can go on.

Learning rows of codecs are trained in one process, all else in workers. A run that was interrupted goes on where it was.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from thinwire import __version__, checkpoint
from thinwire.board.cases import Case
from thinwire.board.request import SKIPPED_STEPS
from thinwire.board.rows import Row, metrics_of_workers, read_lines, read_row, refuse_row_of_others, row_settings, write_row
from thinwire.cluster.launch import launch
from thinwire.config.sections import RunConfig
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.metrics.progress import Progress
from thinwire.metrics.track import JsonLines, Tracker
from thinwire.pipeline.inprocess import Pipeline
from thinwire.run.command import TrainCommand
from thinwire.run.here import train_here
from thinwire.run.trainer import Trainer
from thinwire.util.checkpoint_name import checkpoint_name
from thinwire.util.lock import locked

NO_MATTER = frozenset({"seed", "train.steps", "train.validate_every", "train.checkpoint_every", "train.validation_sequences"})
"""Settings that do not change how long a step takes."""
BUSY = 0.7
"""Cores in use by others, or load average, above which a measurement is worth little."""
LOOK_SECONDS = 0.5


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


def count_traffic(folder: Path, trainer: Trainer) -> list[Tracker]:
    """Keep count of what crosses over interruptions."""
    assert isinstance(trainer.compute, Pipeline)
    return [TrafficLog(folder, trainer.compute, trainer.position.step)]


def finished(folder: Path, config: RunConfig, ignored: frozenset[str] = frozenset()) -> Row | None:
    """Return the summary of a run that has done all its steps; refuse the folder if it is a run of other settings."""
    if (folder / CONFIG_FILE).exists():
        made_with = row_settings(read_config(folder / CONFIG_FILE))
        refuse_row_of_others(folder, made_with, config, "remove that run to train it again", ignored)
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


def train_row(config: RunConfig, folder: Path, live: bool = False) -> tuple[Row, int]:
    """Train to the end, here or in workers, from the start or from where an earlier try stopped.

    Return the summary and the step from which it went on; `live` shows the run on this terminal.
    """
    with locked(folder, "--out"):
        step = resumable(folder, config)
        if config.pipeline.mode == "workers":
            summary = launch(TrainCommand(config=config, run=folder, resume=step > 0), shown=live)
        else:
            with Progress(config.train.steps, stream=None if live else StringIO()) as progress:
                begin = partial(count_traffic, folder)
                summary = train_here(config, folder, resume=step > 0, trackers=[progress], begin=begin)
    refuse_unfinished(summary, config)
    return summary, step


def refuse_unfinished(summary: Row, config: RunConfig) -> None:
    """Stop everything where a training was stopped, be it in its last validation."""
    if summary["val_loss"] is None or summary["steps"] < config.train.steps:
        raise KeyboardInterrupt


def validation_curve(metrics: Path, summary: Row) -> dict[int, float]:
    """Return the validation losses by step: those on the way and the final one."""
    found = {line["step"]: line["val_loss"] for line in read_lines(metrics) if "val_loss" in line} | {summary["steps"]: summary["val_loss"]}
    if bad := [step for step, loss in found.items() if loss is None or not math.isfinite(loss)]:
        raise ValueError(
            f"the validation loss after step {bad[0]} is not a number: this training cannot be scored; try a lower --train.rate"
        )
    return found


def metrics_of(folder: Path, config: RunConfig) -> Path:
    """Return the metrics file that has the validation losses."""
    return metrics_of_workers(folder, config) if config.pipeline.mode == "workers" else folder / "metrics" / "stage-all.jsonl"


def learn(case: Case, seed: int, live: bool = False) -> Row:
    """Make a learning row; losses of replicas are means over them."""
    config, path = case.learning(seed), case.learn_path(seed)
    folder = case.run_of(path)
    done = finished(folder, config, case.immaterial)
    summary, resumed_at = (done, 0) if done else train_row(config, folder, live)
    row = {
        "spec": case.spec.text,
        "seed": seed,
        "command": case.command(config),
        "steps": summary["steps"],
        "tokens": summary["tokens"],
        "val_loss": summary["val_loss"],
        "trainable_parameters": summary["trainable_parameters"],
        **case.subject.sent(summary, folder, resumed_at),
        "curve": validation_curve(metrics_of(folder, config), summary),
        "thinwire": __version__,
        "torch": torch.__version__,
    }
    return write_row(path, config, row)


def train_over(case: Case, link: str, seed: int, live: bool = False) -> Row:
    """Make an end-to-end row: the whole training over a link, to see whether steps x seconds per step tells the truth."""
    config, path = case.over(link, seed), case.end_to_end_path(seed, link)
    folder = case.run_of(path)
    summary = finished(folder, config) or train_row(config, folder, live)[0]
    metrics = metrics_of(folder, config)
    losses = validation_curve(metrics, summary)
    row = {
        "spec": case.spec.text,
        "link": link,
        "seed": seed,
        "command": case.command(config),
        "curve": losses,
        "seconds": {line["step"]: line["seconds"] for line in read_lines(metrics) if line["step"] in losses},
        "thinwire": __version__,
        "torch": torch.__version__,
    }
    return write_row(path, config, row)


def busy_cores() -> float | None:
    """Measure how many cores others keep busy right now; unlike the load average it does not remember our own last measurement."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None

    def ticks() -> tuple[int, int]:
        numbers = [int(number) for number in stat.read_text().split("\n", 1)[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # all, and idle or waiting for a disk

    before = ticks()
    time.sleep(LOOK_SECONDS)
    total, idle = (now - then for now, then in zip(ticks(), before, strict=True))
    return round((1 - idle / total) * (os.cpu_count() or 1), 2) if total else None


def load_average() -> float | None:
    """Return the load of the last minute, where the system keeps it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def whole_periods(case: Case, steps: int) -> tuple[int, slice]:
    """Return how many steps to train, and which to count: whole periods of a method that does something every so many steps."""
    period = case.period
    if not period:
        return steps, slice(SKIPPED_STEPS, None)
    counted = math.ceil((steps - SKIPPED_STEPS) / period) * period
    if case.meeting > 1:  # the last step of a run is a meeting too, so a period must end there
        total = math.ceil((SKIPPED_STEPS + counted) / period) * period
        return total, slice(total - counted, total)
    # What an exchange does in the last step of a run alone is none of the period's.
    return SKIPPED_STEPS + counted + (case.meeting == 1), slice(SKIPPED_STEPS, SKIPPED_STEPS + counted)


def time_steps(case: Case, link: str, steps: int, live: bool = False) -> Row:
    """Train a few steps over a link."""
    steps, counted = whole_periods(case, steps)
    config = case.timed(link, steps)
    load, busy = load_average(), busy_cores()
    with tempfile.TemporaryDirectory(prefix="thinwire-speed-") as folder:
        run = Path(folder) / "run"
        summary, _ = train_row(config, run, live)
        times = [0.0, *(line["seconds"] for line in read_lines(metrics_of(run, config)))]
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return {
        "seconds_per_step": (statistics.fmean if case.period else statistics.median)(seconds[counted]),
        "steps": steps,
        "socket_bytes": summary["socket_bytes"],
        "bytes_per_step": summary["bytes_per_step"],
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "load_average": load,
        "busy_cores": busy,
    }


def disturbance(turn: Row) -> float:
    """Say how much others disturbed a measurement, in cores."""
    return turn["load_average"] or 0.0 if turn["busy_cores"] is None else turn["busy_cores"]


def add_turn(case: Case, link: str, steps: int, live: bool = False) -> Row:
    """Measure once more and put the row in place."""
    config, path = case.timed(link, steps), case.speed_path(link)
    before = read_row(path, config, NO_MATTER)
    turns = [*(before["turns"] if before else []), time_steps(case, link, steps, live)]
    seconds = statistics.median(turn["seconds_per_step"] for turn in turns)
    row = {
        "spec": case.spec.text,
        "link": link,
        "command": case.command(config),
        "seconds_per_step": seconds,
        "tokens_per_second": config.train.batch * config.model.context / seconds,
        "peak_rss_bytes": [max(peak or 0 for peak in stage) for stage in zip(*(turn["peak_rss_bytes"] for turn in turns), strict=True)],
        "turns": turns,
        "cores": os.cpu_count(),
        "thinwire": __version__,
        "torch": torch.__version__,
    }
    return write_row(path, config, row)
