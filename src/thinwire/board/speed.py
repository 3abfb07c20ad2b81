"""Speed rows: seconds per step of a spec in real workers over an emulated link. Repeats are kept one by one; their median counts."""

from __future__ import annotations

import io
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import torch

from thinwire import __version__
from thinwire.board.cases import Case
from thinwire.board.command import SKIPPED_STEPS
from thinwire.board.learn import refuse_unfinished
from thinwire.board.rows import Row, metrics_of_workers, read_lines, read_row, write_row
from thinwire.cluster.launch import launch
from thinwire.run.settings import TrainCommand

NO_MATTER = frozenset({"seed", "train.steps", "train.validate_every", "train.checkpoint_every", "train.validation_sequences"})
"""Settings that do not change how long a step takes."""
BUSY = 0.7
"""Cores in use by others, or load average, above which a measurement is worth little."""
LOOK_SECONDS = 0.5


def supervised(command: TrainCommand) -> Row:
    """Train in workers; show them on a terminal, say nothing elsewhere."""
    with nullcontext() if sys.stdout.isatty() else redirect_stdout(io.StringIO()):
        summary = launch(command)
    refuse_unfinished(summary, command.config)
    return summary


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


def measure(case: Case, link: str, steps: int) -> Row:
    """Train a few steps over a link."""
    steps, counted = whole_periods(case, steps)
    config = case.timed(link, steps)
    load, busy = load_average(), busy_cores()
    with tempfile.TemporaryDirectory(prefix="thinwire-speed-") as folder:
        run = Path(folder) / "run"
        summary = supervised(TrainCommand(config=config, run=run, resume=False))
        times = [0.0, *(line["seconds"] for line in read_lines(metrics_of_workers(run, config)))]
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


def add_turn(case: Case, link: str, steps: int, path: Path) -> Row:
    """Measure once more and put the row in place."""
    config = case.timed(link, steps)
    before = read_row(path, config, NO_MATTER)
    turns = [*(before["turns"] if before else []), measure(case, link, steps)]
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
