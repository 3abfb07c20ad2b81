"""Rows of whole trainings in workers: end to end over a link, to see whether steps x seconds per step tells the truth; and of replicas."""

from __future__ import annotations

from pathlib import Path

import torch

from thinwire import __version__
from thinwire.board.cases import Case
from thinwire.board.learn import curve, finished, resumable, write_learnt
from thinwire.board.rows import Row, metrics_of_workers, read_lines, write_row
from thinwire.board.speed import supervised
from thinwire.config.sections import RunConfig
from thinwire.run.settings import TrainCommand
from thinwire.util.lock import locked


def train_in_workers(config: RunConfig, folder: Path) -> tuple[Row, int]:
    """Train to the end unless that has been done; return the summary, and the step from which an interrupted run went on."""
    summary = finished(folder, config)
    if summary is not None:
        return summary, 0
    with locked(folder, "--out"):
        step = resumable(folder, config)
        return supervised(TrainCommand(config=config, run=folder, resume=step > 0)), step


def train_over(case: Case, link: str, seed: int, path: Path) -> Row:
    """Make an end-to-end row."""
    config, folder = case.over(link, seed), case.runs / f"{case.name(seed)}-{link}"
    summary, _ = train_in_workers(config, folder)
    metrics = metrics_of_workers(folder, config)
    losses = curve(metrics, summary)
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


def learn_together(case: Case, seed: int, path: Path) -> Row:
    """Make a learning row of replicas, which exist in workers only; losses are means over the replicas."""
    config, folder = case.learning(seed), case.runs / case.name(seed)
    summary, resumed_at = train_in_workers(config, folder)
    sent = {f"{case.subject.unit}_{part}": summary["bytes_per_step"][part] for part in case.subject.parts}
    if (exchanged := exchanged_bytes(folder)) is not None:
        sent[f"{case.subject.unit}_exchange"], resumed_at = exchanged / summary["steps"], 0
    return write_learnt(path, case, seed, config, summary, sent | {"resumed_at": resumed_at}, metrics_of_workers(folder, config))


def exchanged_bytes(folder: Path) -> int | None:
    """Add up what all workers exchanged in all steps, also those before a loss or an interruption; None if an earlier version counted."""
    lines = [line for path in folder.glob("**/metrics/stage-*.jsonl") for line in read_lines(path)]
    return sum(line["exchange_bytes"] for line in lines) if all("exchange_bytes" in line for line in lines) else None
