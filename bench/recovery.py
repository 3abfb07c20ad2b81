"""What a fault costs in time: kills, TCP resets and outages of a small training in 4 workers on this machine.

    .venv/bin/python bench/recovery.py [--repeats 5] [--outage 3]

Each fault strikes a random moment, with a few steps between. The replacement process is up when its supervisor first hears of it. The
first new forward is computed when all links are open and the checkpoint is restored; steps since that checkpoint are replayed after it
and not counted in. An outage, and a reset, cost what the step that meets it takes longer than the usual one. The cost of a reset is also
measured by itself: the longest time between two frames of a link that carries one every 2 ms.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine_bench import write_results
from faulty import STAGES, Watched, reset_gaps, run

GOALS = {
    "kill to first new forward": 10.0,
    "replacement up to first new forward": 0.5,
    "TCP reset, frames of a link": 0.1,
    "outage, beyond its length": 1.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--outage", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    moments: dict[str, list[tuple[float, int]]] = {"kill": [], "reset": [], "cut": []}

    def harm(watched: Watched) -> None:
        watched.wait_for(5)
        for action in ("kill", "reset", "cut"):
            for _ in range(arguments.repeats):
                watched.wait_for(6)
                time.sleep(generator.uniform(0.0, 0.3))
                stage = generator.randrange(STAGES)
                at = watched.kill(stage) if action == "kill" else watched.order(stage, action, arguments.outage)
                moments[action].append((at, stage))

    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as scratch:
        watched, _, _ = run(Path(scratch) / "faulty", 20 + 30 * arguments.repeats, harm, "--link.silent_seconds", "10")
        link_gaps = reset_gaps(Path(scratch) / "link", 4 * arguments.repeats)
    report(watched, moments, arguments.outage, link_gaps)


def report(watched: Watched, moments: dict[str, list[tuple[float, int]]], outage: float, link_gaps: list[float]) -> None:
    """Print and keep the figures."""
    usual = watched.usual_gap()
    figures: dict[str, list[float]] = {name: [] for name in GOALS}
    figures |= {"kill noticed": [], "kill to replacement up": [], "TCP reset, step": [], "TCP reset, frames of a link": link_gaps}
    for at, stage in moments["kill"]:
        up, restored = watched.first("pid", at, stage), [watched.first("restored", at, each) for each in range(STAGES)]
        assert up is not None and None not in restored
        ready = max(restored)  # type: ignore[type-var]
        figures["kill noticed"].append((watched.first("lost", at, stage) or at) - at)
        figures["kill to replacement up"].append(up - at)
        figures["kill to first new forward"].append(ready - at)
        figures["replacement up to first new forward"].append(ready - up)
    for action, name, length in (("reset", "TCP reset, step", 0.0), ("cut", "outage, beyond its length", outage)):
        for at, _ in moments[action]:
            figures[name].append(watched.longest_gap(at) - length - usual)
    table = Table(title=f"{STAGES} workers, step {usual:.3f} s (median), outages of {outage} s; seconds")
    for heading in ("figure", "median", "worst", "goal", "times"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    rows: dict[str, Any] = {}
    for name, values in figures.items():
        rows[name] = {"median": statistics.median(values), "worst": max(values), "goal": GOALS.get(name), "values": values}
        goal = "" if GOALS.get(name) is None else f"{GOALS[name]}"
        table.add_row(name, f"{rows[name]['median']:.3f}", f"{rows[name]['worst']:.3f}", goal, str(len(values)))
    Console(width=120).print(table)
    write_results("recovery", {"step_seconds": usual, "outage_seconds": outage, "figures": rows})


if __name__ == "__main__":
    main()
