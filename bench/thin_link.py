"""What a thin link leaves of the speed: tokens/s of `laptop`, 4 workers on this machine, `subspace` and `dense` on 2 Mbit/s.

    .venv/bin/python bench/thin_link.py [--repeats 2]

The sides alternate inside one run; ratios are medians over the turns. The limit of a side is the smaller of its tokens/s on `open` and
link rate / wire bytes per token (socket bytes of the busiest boundary and direction; the link is full duplex). The first step of
each run, which also pays for start-up, is left out.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from engine_bench import write_results
from thinwire.config.profiles import find_profile
from trained import Trained, train

PROFILE = "dsl_2mbps"
SIDES = {  # words and steps
    "subspace on open": ("--codec.name subspace --link.profile open", 10),
    f"subspace on {PROFILE}": (f"--codec.name subspace --link.profile {PROFILE}", 10),
    f"dense on {PROFILE}": (f"--codec.name dense --link.profile {PROFILE}", 3),
}


def ratios(turn: dict[str, Trained], rate: float) -> dict[str, float]:
    """Compare the sides of one turn."""
    free, thin, dense = turn.values()
    limit = min(free.tokens_per_second, rate / thin.wire_bytes_per_token)
    return {
        "subspace: share of its limit (at least 0.9)": thin.tokens_per_second / limit,
        "subspace: share of its speed on open": thin.tokens_per_second / free.tokens_per_second,
        "subspace to dense (at least 5)": thin.tokens_per_second / dense.tokens_per_second,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    repeats = parser.parse_args().repeats
    rate = find_profile(PROFILE).up_mbps * 125_000  # type: ignore[operator]
    turns = [{name: train(words, steps) for name, (words, steps) in SIDES.items()} for _ in range(repeats)]
    table = Table(title=f"laptop, 4 workers, median of {repeats}")
    for heading in ("side", "tokens/s", "payload bytes/token, both ways", "wire bytes/token, one way", "link's limit, tokens/s"):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for name in SIDES:
        figures = [asdict(turn[name]) for turn in turns]
        speed, wire, payload = (
            statistics.median(row[key] for row in figures)
            for key in ("tokens_per_second", "wire_bytes_per_token", "payload_bytes_per_token")
        )
        limit = f"{rate / wire:,.0f}" if PROFILE in name else "none"
        table.add_row(name, f"{speed:,.0f}", f"{payload:.1f}", f"{wire:.1f}", limit)
    console = Console(width=120)
    console.print(table)
    found = [ratios(turn, rate) for turn in turns]
    middle = {key: statistics.median(row[key] for row in found) for key in found[0]}
    for key, value in middle.items():
        console.print(f"{key}: {value:.2f}  ({', '.join(f'{row[key]:.2f}' for row in found)})")
    write_results("thin_link", {"ratios": middle, "turns": [{name: asdict(side) for name, side in turn.items()} for turn in turns]})


if __name__ == "__main__":
    main()
