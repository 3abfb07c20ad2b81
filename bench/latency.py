"""How much of a long round trip the schedules hide: seconds per step against the bound of any synchronous schedule, on the testbed.

    sudo .venv/bin/python bench/latency.py [--steps 5]

Hosts are network namespaces with the kernel's own TCP. Compute is emulated: 50 ms forward, 100 ms backward; 16 microbatches, payloads of
80 KB, 80 Mbit/s. Bound: (M + S - 1)(f + b) + 2 (S - 1)(one-way delay + frame time). Sides: torch's gloo with Schedule1F1B and with
ScheduleInterleaved1F1B, and thinwire's links (mutual TLS) with its `depth` schedule. Medians of the timed steps. A run with fewer
--stages or --rtt replaces those rows of the results and keeps the others.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from engine_bench import RESULTS, Order, run_sides, write_results
from testbed import obstacle

SIDES = ("gloo-1f1b", "gloo-interleaved", "thinwire")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rtt", type=float, nargs="*", default=[0.0, 50.0, 150.0], help="round trips, ms")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    arguments = parser.parse_args()
    if reason := obstacle():
        sys.exit(reason)
    table = Table(title=f"s/step (share of the bound), median of {arguments.steps}; f 50 ms, b 100 ms, 16 microbatches, 80 KB, 80 Mbit/s")
    for heading in ("stages", "RTT ms", "bound", *arguments.sides, "thinwire to gloo-1f1b"):
        table.add_column(heading, justify="right")
    rows = []
    for stages in arguments.stages:
        for rtt in arguments.rtt:
            order = Order(
                stages=stages,
                microbatches=16,
                payload_bytes=80_000,
                rate_mbps=80,
                rtt_ms=rtt,
                sides=tuple(arguments.sides),
                steps=arguments.steps,
            )
            found = run_sides(order)
            for row in found.values():
                row.pop("opened", None), row.pop("done", None)
            rows.append({"stages": stages, "rtt_ms": rtt, "bound": order.bound_seconds, "sides": found})
            cells = [f"{row['median']:.3f} ({100 * order.bound_seconds / row['median']:.1f} %)" for row in found.values()]
            speed = found["gloo-1f1b"]["median"] / found["thinwire"]["median"] if len(found) == len(SIDES) else float("nan")
            table.add_row(str(stages), f"{rtt:.0f}", f"{order.bound_seconds:.3f}", *cells, f"{speed:.2f} x")
            print(f"{stages} stages, {rtt:.0f} ms: {', '.join(f'{side} {cell}' for side, cell in zip(found, cells, strict=True))}")
    Console(width=140).print(table)
    kept = json.loads(file.read_text()) if (file := RESULTS / "latency.json").exists() else []
    found_now = {(row["stages"], row["rtt_ms"]): row for row in (*kept, *rows)}
    write_results("latency", [found_now[key] for key in sorted(found_now)])


if __name__ == "__main__":
    main()
