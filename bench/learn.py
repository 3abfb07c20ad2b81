"""Learning curves of the `small` config for several boundaries; finished rows are kept in bench/results/learn and not run again.

    .venv/bin/python bench/learn.py              train what is missing (about 15 minutes a row on one core), print the table
    .venv/bin/python bench/learn.py --only NAME  one row, so that two can run side by side
    .venv/bin/python bench/learn.py --table      print the table of what is there

Each row is `thinwire train --config small --train.threads 1` plus the words listed in ROWS.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from thinwire.metrics.progress import Progress
from thinwire.pipeline.alone import GroupAlone
from thinwire.pipeline.inprocess import build_pipeline
from thinwire.run.agree import Start, agree
from thinwire.run.command import parse_train
from thinwire.run.trainer import Trainer
from thinwire.util.files import write_atomic

RESULTS = Path(__file__).parent / "results" / "learn"
ROWS = {
    "dense": "--codec.name dense",
    "subspace-16": "--codec.rank 16",
    "subspace-16-8bit": "--codec.rank 16 --codec.bits 8 --codec.rounding stochastic",
}


def run(name: str) -> None:
    """Train one row and keep its summary and validation curve."""
    words = ["--config", "small", "--train.threads", "1", *ROWS[name].split()]
    with tempfile.TemporaryDirectory(prefix="thinwire-learn-") as folder:
        path = Path(folder) / "run"
        config = parse_train([*words, "--run", str(path)]).config
        with Progress(config.train.steps) as progress:
            trainer = Trainer(config, path, build_pipeline(config, torch.device("cpu")), GroupAlone(), trackers=[progress])
            agree(trainer, Start())
            summary = trainer.run()
        lines = [json.loads(line) for line in (path / "metrics" / "stage-all.jsonl").read_text().splitlines()]
    curve = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line} | {summary["steps"]: summary["val_loss"]}
    RESULTS.mkdir(parents=True, exist_ok=True)
    row = {"command": "thinwire train " + " ".join(words), "curve": curve, "summary": summary}
    write_atomic(RESULTS / f"{name}.json", json.dumps(row, indent=1).encode())


def table() -> str:
    """Write the finished rows as a Markdown table."""
    rows = {name: json.loads(path.read_text()) for name in ROWS if (path := RESULTS / f"{name}.json").exists()}
    if not rows:
        return "no finished rows"
    steps = sorted({int(step) for row in rows.values() for step in row["curve"]})
    lines = ["| row | " + " | ".join(f"step {step}" for step in steps) + " | to dense | bytes/token both ways | parameters |"]
    lines.append("|---" * (len(steps) + 4) + "|")
    reference = rows.get("dense", {}).get("summary", {}).get("val_loss")
    for name, row in rows.items():
        summary = row["summary"]
        cells = [f"{row['curve'][str(step)]:.3f}" if str(step) in row["curve"] else "" for step in steps]
        distance = f"{100 * (summary['val_loss'] / reference - 1):+.2f} %" if reference else ""
        size = summary["bytes_per_token_forward"] + summary["bytes_per_token_backward"]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {distance} | {size:.0f} | {summary['trainable_parameters']:,} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=ROWS, help="train this row alone")
    parser.add_argument("--table", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    for name in [] if arguments.table else [arguments.only] if arguments.only else ROWS:
        if not (RESULTS / f"{name}.json").exists():
            run(name)
    print(table())


if __name__ == "__main__":
    main()
