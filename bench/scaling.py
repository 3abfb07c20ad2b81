"""The loss gap to dense at equal trainable parameters, by width, compression and tokens: a row file per training, and curves.

    .venv/bin/python bench/scaling.py --status       what is there, and what comes next
    .venv/bin/python bench/scaling.py --next 5       train the next five rows that are missing, in order of value per cost
    .venv/bin/python bench/scaling.py --fit          write bench/results/scaling.json, docs/scaling.md and its plot from the rows there are

Every finished training is a file in bench/results/scaling; one that is stopped begins anew. The second corpus, without which its rows are
left out, is 7 MB of English that anybody can get: `pip download --no-deps --no-binary :all: django==5.2.1`, unpack it, and give
`--prose 'django-5.2.1/docs/**/*.txt'`. The grid is in scaling_jobs.py, the fit in scaling_fit.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scaling_fit import fit_all, write_document
from scaling_jobs import STEP_TOKENS, Job, config_of, missing_jobs
from thinwire import __version__, api
from thinwire.data.open import open_data
from thinwire.util.files import write_atomic

RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "scaling"
DOCS = Path(__file__).parents[1] / "docs"


def read_rows() -> dict[Job, dict[str, Any]]:
    """Return the rows that are there."""
    rows = [json.loads(path.read_text()) for path in sorted(ROWS.glob("*.json"))]
    return {Job(**row["job"]): row for row in rows}


def train(job: Job, source: str) -> dict[str, Any]:
    """Train one row and write it."""
    config = config_of(job, source)
    with tempfile.TemporaryDirectory(prefix="thinwire-scaling-") as folder:
        result = api.train(config, Path(folder) / "run")
    if not result.finished:
        raise KeyboardInterrupt
    summary, data = result.summary, open_data(config.data, config.model, config.seed)
    sent = summary["bytes_per_token_forward"] + summary["bytes_per_token_backward"]
    row = {
        "job": asdict(job),
        "options": {name: value for name, value in asdict(config.codec).items() if value is not None},
        "ffn": config.model.ffn,
        "val_loss": summary["val_loss"],
        "trainable_parameters": summary["trainable_parameters"],
        "tokens": summary["tokens"],
        "bytes_per_token": sent,
        "compression": 4 * job.width / sent if sent else None,
        "data": data.fingerprint,
        "python": platform.python_version(),
        "thinwire": __version__,
        "torch": torch.__version__,
    }
    assert summary["tokens"] == job.steps * STEP_TOKENS
    ROWS.mkdir(parents=True, exist_ok=True)
    write_atomic(ROWS / f"{job.name}.json", json.dumps(row, indent=1).encode() + b"\n")
    return row


def status(rows: dict[Job, dict[str, Any]], missing: list[Job]) -> str:
    """Say what is there and what comes next."""
    lines = []
    for job, row in sorted(rows.items()):
        dense = rows.get(job.dense)
        gap = f"{100 * (row['val_loss'] / dense['val_loss'] - 1):+7.2f} %" if dense else "        -"
        times = f"{row['compression']:6.1f}x" if row["compression"] else "      -"
        lines.append(f"{job.name:38} {row['val_loss']:.4f} {gap} {times} {row['trainable_parameters']:>12,}")
    return "\n".join([*lines, f"{len(rows)} rows; {len(missing)} missing, next: {', '.join(job.name for job in missing[:5])}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--next", type=int, default=0, metavar="N", help="train the next N rows that are missing")
    parser.add_argument("--most-steps", type=int, default=10**9, help="leave out longer trainings")
    parser.add_argument("--most-width", type=int, default=10**9, help="leave out wider networks")
    parser.add_argument("--prose", help="the second corpus: a text file or glob")
    parser.add_argument("--status", action="store_true", help="list what is there")
    parser.add_argument("--fit", action="store_true", help="fit curves and write them")
    arguments = parser.parse_args()
    sources = {"stdlib": "stdlib"} | ({"prose": arguments.prose} if arguments.prose else {})

    def missing() -> list[Job]:
        losses = {job: row["val_loss"] for job, row in read_rows().items()}
        jobs = missing_jobs(losses, tuple(sources))
        return [job for job in jobs if job.steps <= arguments.most_steps and job.width <= arguments.most_width]

    for _ in range(arguments.next):
        if not (jobs := missing()):
            break
        row = train(jobs[0], sources[jobs[0].corpus])
        print(f"{jobs[0].name}: {row['val_loss']:.4f}", flush=True)
    if arguments.fit:
        fitted = fit_all(read_rows())
        write_atomic(RESULTS / "scaling.json", json.dumps(fitted, indent=1).encode() + b"\n")
        write_document(fitted, DOCS)
    if arguments.status or not (arguments.next or arguments.fit):
        print(status(read_rows(), missing()))


if __name__ == "__main__":
    main()
