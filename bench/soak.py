"""Twenty minutes of faults: 4 workers, a snapshot every step, a random fault every 20 s on average.

    .venv/bin/python bench/soak.py [--minutes 20] [--every 20] [--seed 1] [--redraw]

Faults: a worker killed at a random moment, all TCP connections of a worker reset, a worker frozen for 1 to 4 s (SIGSTOP, SIGCONT), the
links of a worker cut for 1 to 4 s. The speed is compared with the fault-free one after subtracting from the time of the faulty run what is
not recovery: from each kill until the supervisor first hears of the replacement process, and the lengths of the freezes and cuts. The
fault-free speed is measured twice: by calm runs before and after; and inside the run, where the machine is the same. There every stretch
from one fault to the next takes what its fault costs, by its kind, and a fixed time per step; least squares find these five numbers.
These parts want a quiet machine, 25 minutes. Then comes the same run without faults, as many steps: at the end the weights of the faulty
one must have its SHA-256. --redraw prints the figures that were kept.
Memory: the resident size of a process when it is last seen against its size 30 s after it was first seen (processes that live 60 s).
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine_bench import RESULTS, write_results
from faulty import STAGES, Watched, run

GOAL = 0.9
KINDS = ("kill", "reset", "freeze", "cut")
TRY_STEPS = 60
CALM_SECONDS = 60.0
MEMORY_SECONDS = 5.0


class Harm:
    """Strike at random moments; remember when, what and whom."""

    def __init__(self, every: float, seed: int) -> None:
        self.every, self.random = every, random.Random(seed)
        self.struck: list[dict[str, Any]] = []
        self.memory: dict[int, list[tuple[float, int]]] = collections.defaultdict(list)

    def __call__(self, watched: Watched) -> None:
        watched.wait_for(3)
        at = time.monotonic() + self.random.expovariate(1 / self.every)
        while not watched.over.wait(min(MEMORY_SECONDS, max(0.0, at - time.monotonic()))):
            for pid, size in watched.memory().items():
                self.memory[pid].append((time.monotonic(), size))
            if time.monotonic() >= at:
                self._strike(watched)
                watched.wait_for(2)  # five losses in a row without a step would end the run, as they should
                at = time.monotonic() + self.random.expovariate(1 / self.every)

    def _strike(self, watched: Watched) -> None:
        kind, stage = self.random.choice(KINDS), self.random.randrange(STAGES)
        seconds = self.random.uniform(1.0, 4.0) if kind in ("freeze", "cut") else 0.0
        self.struck.append({"kind": kind, "stage": stage, "seconds": seconds, "at": time.monotonic(), "step": watched.best})
        pid = watched.pids[stage]
        if kind == "kill":
            watched.kill(stage)
        elif kind == "freeze":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                watched.over.wait(seconds)
                os.kill(pid, signal.SIGCONT)
        else:
            watched.order(stage, kind, seconds)

    def growth(self) -> list[tuple[float, int, int]]:
        """Return for each process that lived long enough: seconds, KB after 30 s, KB at the end."""
        found = []
        for sizes in self.memory.values():
            later = [(at, size) for at, size in sizes if at >= sizes[0][0] + 30]
            if later and later[-1][0] - sizes[0][0] >= 60:
                found.append((later[-1][0] - later[0][0], later[0][1], later[-1][1]))
        return found


def startup_seconds(watched: Watched, struck: list[dict[str, Any]]) -> float:
    """Add up the time from each kill until the replacement was up."""
    kills = [fault for fault in struck if fault["kind"] == "kill"]
    ups = [watched.first("pid", fault["at"], fault["stage"]) for fault in kills]
    return sum(up - fault["at"] for up, fault in zip(ups, kills, strict=True) if up is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--redraw", action="store_true")
    arguments = parser.parse_args()
    if arguments.redraw:
        show(json.loads((RESULTS / "soak.json").read_text()))
        return
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as scratch:
        _, _, seconds = run(Path(scratch) / "try", TRY_STEPS)
        short = max(TRY_STEPS, int(CALM_SECONDS / (seconds / (TRY_STEPS - 1))))
        harm = Harm(arguments.every, arguments.seed)
        _, _, first = run(Path(scratch) / "before", short)
        steps = max(20, int(arguments.minutes * 60 / (first / (short - 1))))  # the outages come on top
        watched, summary, total = run(Path(scratch) / "faulty", steps, harm)
        _, _, second = run(Path(scratch) / "after", short)
        calm = [seconds / (short - 1) for seconds in (first, second)]
        print(f"calm steps took {calm[0]:.4f} s before and {calm[1]:.4f} s after; now the same run without faults", flush=True)
        _, quiet, _ = run(Path(scratch) / "quiet", steps)
    results = {
        "steps": steps,
        "every": arguments.every,
        "equal": summary["weights_sha256"] == quiet["weights_sha256"],
        "seconds": total,
        "calm_step_seconds": calm,
        "startup_seconds": startup_seconds(watched, harm.struck),
        "outage_seconds": sum(fault["seconds"] for fault in harm.struck),
        "replayed": len(watched.steps) - len({step for _, step in watched.steps}),
        "faults": harm.struck,
        "growth": harm.growth(),
    }
    write_results("soak", results)
    show(results)


def fit(faults: list[dict[str, Any]]) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step between faults, and what a fault of each kind costs beyond the outage itself."""
    stretches = list(itertools.pairwise(faults))
    known = [[late["step"] - fault["step"], *(float(fault["kind"] == kind) for kind in KINDS)] for fault, late in stretches]
    taken = [[late["at"] - fault["at"] - fault["seconds"]] for fault, late in stretches]
    step, *costs = torch.linalg.lstsq(torch.tensor(known).double(), torch.tensor(taken).double()).solution.flatten().tolist()
    return step, dict(zip(KINDS, costs, strict=True))


def show(results: dict[str, Any]) -> None:
    """Print the figures."""
    steps, calm = results["steps"], results["calm_step_seconds"]
    working = results["seconds"] - results["outage_seconds"] - results["startup_seconds"]
    inside, costs = fit(results["faults"])
    counts = collections.Counter(fault["kind"] for fault in results["faults"])
    rows = {
        "steps": f"{steps:,}",
        "faults": ", ".join(f"{counts[kind]} x {kind}" for kind in KINDS),
        "weights equal to those of the run without faults": "yes" if results["equal"] else "NO",
        "minutes": f"{results['seconds'] / 60:.1f}",
        "of it process start-up and injected outages": f"{results['startup_seconds']:.1f} s and {results['outage_seconds']:.1f} s",
        "a step without faults: before, after, and between the faults": f"{calm[0]:.4f}, {calm[1]:.4f} and {inside:.4f} s",
        "a fault costs beyond its outage": ", ".join(f"{kind} {cost:.1f} s" for kind, cost in costs.items()),
        f"throughput against fault-free between the faults (goal {GOAL})": f"{inside * (steps - 1) / working:.3f}",
        "the same against the calm runs before and after": f"{statistics.fmean(calm) * (steps - 1) / working:.3f}",
        "steps replayed": str(results["replayed"]),
        f"growth of the resident size, worst of {len(results['growth'])} processes": (
            f"{max((end / start - 1 for _, start, end in results['growth']), default=0.0):+.1%}"
        ),
    }
    table = Table(
        title=f"soak: {STAGES} workers, snapshot every step, a fault every {results['every']:.0f} s on average", show_header=False
    )
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
