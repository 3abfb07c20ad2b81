"""Shared by the benches that train for real: run `thinwire train` on this machine and read what its stages measured."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FIRST = 1
"""Steps left out: the first one also pays for start-up."""
QUIET = ["--train.validate_every", "0", "--train.checkpoint_every", "0", "--train.validation_sequences", "2"]


@dataclass(frozen=True)
class Trained:
    """Figures of one run, its first steps left out."""

    tokens_per_second: float
    wire_bytes_per_token: float
    """Socket bytes of the busiest boundary and direction."""
    payload_bytes_per_token: float
    """The codec's bytes, forward and backward together."""
    step_seconds: float
    wait_share: list[float]
    """For each stage, the share of its time in which it waited for a neighbour."""


def train(words: str, steps: int, stages: int = 4) -> Trained:
    """Train the `laptop` config with these words."""
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "thinwire", "train", "--config", "laptop", "--run", str(run), "--train.steps", str(steps)]
        subprocess.run([*command, *QUIET, *words.split()], check=True, stdout=subprocess.DEVNULL, timeout=900)
        lines = [(run / "metrics" / f"stage-{stage}.jsonl").read_text().splitlines() for stage in range(stages)]
    rows = [[json.loads(line) for line in each[FIRST:]] for each in lines]
    tokens = rows[0][0]["tokens"] / rows[0][0]["step"]
    seconds = [tokens / row["tokens_per_second"] for row in rows[0]]
    carried = [
        sum(row[side] * 125_000 * tokens / row["tokens_per_second"] for row in stage) / (tokens * len(stage))
        for stage in rows
        for side in ("left_mbps", "right_mbps")
        if side in stage[0]
    ]
    return Trained(
        tokens_per_second=tokens * len(seconds) / sum(seconds),
        wire_bytes_per_token=max(carried),
        payload_bytes_per_token=rows[0][-1]["bytes_per_token"],
        step_seconds=statistics.median(seconds),
        wait_share=[statistics.mean(row["wait_seconds"] * row["tokens_per_second"] / tokens for row in stage) for stage in rows],
    )
