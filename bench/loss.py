"""What packet loss costs a step, with BBR and with cubic, on the testbed.

    sudo .venv/bin/python bench/loss.py [--steps 10]

2 stages, 8 microbatches, emulated compute (50 ms forward, 100 ms backward), payloads of 500 KB, 80 Mbit/s, round trip 50 ms, 0.5 % of
packets lost in each direction at random. Bound: (M + S - 1)(f + b) + 2 (S - 1)(one-way delay + frame time). Medians of the timed steps;
the slowest step is shown too, because losses fall unevenly.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from engine_bench import Order, run_sides, write_results
from testbed import obstacle

LIMIT = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side")
    parser.add_argument("--loss", type=float, default=0.005)
    arguments = parser.parse_args()
    if reason := obstacle():
        sys.exit(reason)
    sides = ("thinwire-bbr", "thinwire-cubic")
    order = Order(stages=2, microbatches=8, payload_bytes=500_000, rate_mbps=80, rtt_ms=50, sides=sides, steps=arguments.steps)
    found = run_sides(order, loss=arguments.loss, timeout=60 * arguments.steps)
    bound = order.bound_seconds
    table = Table(title=f"{100 * arguments.loss:.1f} % loss, 50 ms, 80 Mbit/s, 500 KB: bound {bound:.3f} s/step; {arguments.steps} steps")
    for heading in ("congestion control", "s/step, median", "to the bound", "slowest step", f"at most {LIMIT} x"):
        table.add_column(heading, justify="right")
    for row in found.values():
        del row["opened"], row["done"]
        held = "yes" if row["median"] <= LIMIT * bound else "no"
        table.add_row(row["congestion"], f"{row['median']:.3f}", f"{row['median'] / bound:.2f} x", f"{max(row['seconds']):.3f}", held)
    Console().print(table)
    write_results("loss", {"loss": arguments.loss, "bound": bound, "sides": found})


if __name__ == "__main__":
    main()
