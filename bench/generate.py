"""What a thin link leaves of writing: tokens/s, time to the first token and bytes, 4 workers, `subspace` against `dense` in one run.

    .venv/bin/python bench/generate.py [--turns 3] [--tokens 32] [--links dsl_2mbps home_80mbps satellite]

Two models: `laptop` (D=256) and a wider one (D=2048), untrained, since speed does not depend on what was learnt. The sides alternate;
figures are medians over the turns. One token crosses S-1 boundaries forward, and its successor's id comes back over the same S-1 hops:
no method can write faster than 1 / (2 (S-1) delay) tokens/s ("bound" in the table); what a codec saves is the time on the line.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine_bench import write_results
from thinwire.cli.generate import GenerateCommand, settings, write_text
from thinwire.config.profiles import find_profile
from thinwire.pipeline.meter import Traffic
from thinwire.run.generate import Order
from thinwire.run.sampling import Sampling

STAGES, PROMPT = 4, 256
WIDE = "--model.width 2048 --model.heads 16 --model.kv_heads 4 --model.ffn 5504 --model.layers 4"
MODELS = {"laptop, D=256": ("", "--codec.rank 8"), "wide, D=2048": (WIDE, "--codec.rank 16")}
SIDES = {"dense": "--codec.name dense", "subspace": "--codec.name subspace"}


class Clock:
    """Note when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def add(self, token: int) -> None:
        self.times.append(time.perf_counter())


def make_run(folder: Path, words: str) -> Path:
    """Make a run of one step, to have a checkpoint."""
    command = [sys.executable, "-m", "thinwire", "train", "--config", "laptop", "--run", str(folder), "--pipeline.mode", "inprocess"]
    quick = "--train.steps 1 --train.batch 4 --pipeline.microbatches 4 --train.validation_sequences 1 --model.context 32"
    subprocess.run([*command, *quick.split(), *words.split()], check=True, stdout=subprocess.DEVNULL, timeout=600)
    return folder


def measure(folder: Path, link: str, tokens: int) -> dict[str, float]:
    """Write some tokens in workers over a link."""
    command = GenerateCommand(run=folder, mode="workers", profile=link, max_new_tokens=tokens)
    order = Order(length=PROMPT, limit=tokens, end=None, sampling=Sampling(temperature=0))
    clock, started = Clock(), time.perf_counter()
    meters = Traffic(write_text(command, settings(command), [7] * PROMPT, order, clock))  # type: ignore[arg-type]
    return {
        "first_seconds": clock.times[0] - started,
        "tokens_per_second": (tokens - 1) / (clock.times[-1] - clock.times[0]),
        "forward_bytes": meters.per_token("forward"),
        "backward_bytes": meters.per_token("backward"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--links", nargs="+", default=["dsl_2mbps", "home_80mbps", "satellite"])
    given = parser.parse_args()
    table = Table(title=f"{STAGES} workers, {PROMPT} prompt tokens, {given.tokens} new ones, median of {given.turns}")
    for heading in ("model", "link", "codec", "tokens/s", "bound", "bytes forward", "id back", "s to first token"):
        table.add_column(heading, justify="right" if heading not in ("model", "link", "codec") else "left")
    results = []
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as scratch:
        for number, (model, (shape, rank)) in enumerate(MODELS.items()):
            folders = {
                side: make_run(Path(scratch) / f"{side}-{number}", f"{shape} {words} {rank if side == 'subspace' else ''}")
                for side, words in SIDES.items()
            }
            for link in given.links:
                turns = [{side: measure(folders[side], link, given.tokens) for side in SIDES} for _ in range(given.turns)]
                bound = 1 / (2 * (STAGES - 1) * find_profile(link).delay_ms / 1000)
                for side in SIDES:
                    row = {name: statistics.median(turn[side][name] for turn in turns) for name in turns[0][side]}
                    results.append({"model": model, "link": link, "codec": side, "bound": bound, "turns": given.turns, **row})
                    figures = (row["tokens_per_second"], bound, row["forward_bytes"], row["backward_bytes"], row["first_seconds"])
                    table.add_row(model, link, side, *(f"{value:.1f}" for value in figures))
    Console(width=140).print(table)
    write_results("generate", results)


if __name__ == "__main__":
    main()
