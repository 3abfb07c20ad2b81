"""Twenty minutes of faults: 4 workers, a snapshot every step, a random fault every 20 s on average.

    .venv/bin/python bench/soak.py [--minutes 20] [--every 20] [--seed 1]

Faults: a worker killed at a random moment, all TCP connections of a worker reset, a worker frozen for 1 to 4 s (SIGSTOP, SIGCONT), the
links of a worker cut for 1 to 4 s. The speed is compared with that of calm runs before and after, after subtracting from the time of the
faulty run what is not recovery: from each kill until the supervisor first hears of the replacement process, and the lengths of the freezes
and cuts. These parts want a quiet machine, 23 minutes. Then comes the same run without faults, as many steps: at the end the weights of
the faulty one must have its SHA-256.
Memory: the resident size of a process when it is last seen against its size 30 s after it was first seen (processes that live 60 s).
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine_bench import write_results
from faulty import STAGES, Watched, run

GOAL = 0.9
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
        kind, stage = self.random.choice(("kill", "reset", "freeze", "cut")), self.random.randrange(STAGES)
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
    arguments = parser.parse_args()
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
    report(watched, harm, total, calm, summary["weights_sha256"] == quiet["weights_sha256"], steps)


def report(watched: Watched, harm: Harm, total: float, calm: list[float], equal: bool, steps: int) -> None:
    """Print and keep the figures."""
    undisturbed = statistics.fmean(calm) * (steps - 1)
    outages = sum(fault["seconds"] for fault in harm.struck)
    startup = startup_seconds(watched, harm.struck)
    share = undisturbed / (total - outages - startup)
    counts = collections.Counter(fault["kind"] for fault in harm.struck)
    replayed = len(watched.steps) - len({step for _, step in watched.steps})
    growth = harm.growth()
    rows = {
        "steps": f"{steps}, {calm[0]:.3f} s each before and {calm[1]:.3f} s after, without faults",
        "faults": ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or "none",
        "weights equal to those of the run without faults": "yes" if equal else "NO",
        "minutes with faults; without, at the calm runs' speed": f"{total / 60:.1f}; {undisturbed / 60:.1f}",
        "of it process start-up and injected outages": f"{startup:.1f} s and {outages:.1f} s",
        "steps replayed": str(replayed),
        f"throughput against fault-free, without these (goal {GOAL})": f"{share:.3f}",
        "growth of the resident size, worst of "
        f"{len(growth)} processes": f"{max((end / start - 1 for _, start, end in growth), default=0.0):+.1%}",
    }
    table = Table(title=f"soak: {STAGES} workers, snapshot every step, a fault every {harm.every:.0f} s on average", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=120).print(table)
    results = {"steps": steps, "equal": equal, "seconds": total, "calm_step_seconds": calm, "startup_seconds": startup}
    results |= {"outage_seconds": outages, "share": share, "replayed": replayed, "faults": harm.struck, "growth": growth}
    write_results("soak", results)


if __name__ == "__main__":
    main()
