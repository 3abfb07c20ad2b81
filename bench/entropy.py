"""How near entropy coding comes to the entropy of its model, and how fast it is.

    .venv/bin/python bench/entropy.py [--sequences 8] [--context 128] [--rank 32] [--repeats 20]

Codes are drawn: Laplace, channels and tokens of different sizes, as those of trained boundaries are. `above` is what a message takes above
the ideal length of its model; speeds are the best of the repeats, in millions of codes per second on one core, and `learn` is what both
ends do with a step's codes when it is committed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from thinwire.bits import entropy
from thinwire.codecs.aim import Aim
from thinwire.codecs.code_model import CodeModel
from thinwire.model.ends import Context

MEANS = (0.1, 0.3, 1.0, 3.0, 30.0)


def codes_of(rows: int, width: int, mean: float) -> np.ndarray:
    """Draw codes whose channels and tokens differ in size."""
    generator = np.random.default_rng(0)
    scale = mean * np.exp(0.6 * generator.normal(size=width)) * np.exp(0.5 * generator.normal(size=(rows, 1)))
    return np.rint(generator.laplace(size=(rows, width)) * scale).astype(np.int64).clip(-entropy.LIMIT, entropy.LIMIT)


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Return the shortest time of some repeats, in seconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def commit_seconds(rows: int, width: int, repeats: int) -> float:
    """Return the shortest time to learn from a step of so many tokens, rotation included now and then."""
    model = CodeModel(width, 4096, Aim(1.5, None), 0.6, torch.float32)
    times = []
    for step in range(repeats):
        ids = torch.randint(0, 4096, (1, rows), generator=torch.Generator().manual_seed(step))
        values = torch.randn(1, rows, width, generator=torch.Generator().manual_seed(step))
        context = Context(step, torch.arange(1))
        model.quantize(*model.in_steps(values, ids, context), ids, context)
        started = time.perf_counter()
        model.commit()
        model.coding()
        times.append(time.perf_counter() - started)
    return sum(times) / len(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("sequences", 8), ("context", 128), ("rank", 32), ("repeats", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    rows, width = options.sequences * options.context, options.rank
    table = Table("mean |code|", "bits per code", "bytes", "ideal", "above", "encode M/s", "decode M/s")
    for mean in MEANS:
        codes = codes_of(rows, width, mean)
        sizes, counts = np.maximum(np.abs(codes).mean(0) * entropy.UNIT, 1).astype(np.int64), entropy.prior_counts()
        for _ in range(3):
            counts = entropy.learn_counts(counts, entropy.count_symbols(codes, sizes))
        tables = entropy.Tables.of(counts)
        data = entropy.encode_codes(codes, sizes, tables)
        assert np.array_equal(entropy.decode_codes(data, rows, sizes, tables), codes)
        ideal = float((entropy.count_symbols(codes, sizes) * tables.lengths()).sum()) / 8
        speeds = [
            codes.size * 1e-6 / fastest(work, options.repeats)
            for work in (lambda: entropy.encode_codes(codes, sizes, tables), lambda: entropy.decode_codes(data, rows, sizes, tables))  # noqa: B023
        ]
        bits, above = 8 * len(data) / codes.size, len(data) - ideal
        table.add_row(f"{mean:g}", f"{bits:.3f}", f"{len(data)}", f"{ideal:.0f}", f"{above:.1f} B", *(f"{speed:.1f}" for speed in speeds))
    console = Console()
    console.print(f"messages of {options.sequences} sequences of {options.context} tokens, {width} channels: {rows * width} codes")
    console.print(table)
    console.print(f"learn: {1e3 * commit_seconds(2048, width, options.repeats):.1f} ms for 2048 tokens, mean over the first steps")


if __name__ == "__main__":
    main()
