"""End-to-end rows: the whole training in workers over a link, to see whether steps x seconds per step tells the truth."""

from __future__ import annotations

from pathlib import Path

import torch

from thinwire import __version__
from thinwire.compare.cases import Case
from thinwire.compare.learn import RUNS, can_resume, curve, finished
from thinwire.compare.rows import Row, read_lines, write_row
from thinwire.compare.speed import supervised
from thinwire.settings import TrainCommand


def train_over(case: Case, link: str, seed: int, path: Path) -> Row:
    """Make an end-to-end row."""
    config, folder = case.over(link, seed), RUNS / f"{case.name(seed)}-{link}"
    summary = finished(folder, config)
    if summary is None:
        summary = supervised(TrainCommand(config=config, run=folder, resume=can_resume(folder, config)))
    metrics = folder / "metrics" / "stage-0.jsonl"
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
