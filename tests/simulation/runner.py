"""Run seeds of the simulation: `python tests/simulation/runner.py 17` shows the trace of one, `0 1000` tells which of many fail.

From the folder of the project, with `PYTHONPATH=src:tests`.
"""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch

from simulation.check import Reference, check
from simulation.cluster import Cluster, in_memory
from simulation.disk import Disks
from simulation.plan import MOST_STEPS, Plan, make_plan
from simulation.scheduler import Pool
from simulation.work import undisturbed
from thinwire.link.identity import make_identity

MOST_MACHINES = 8


class Runner:
    """What many runs share: identities, which take long to make, threads, and what undisturbed runs commit."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disks, self.pool = folder, Disks(), Pool()
        self.identities = [make_identity(folder / f"keys-{number}", f"machine-{number}") for number in range(MOST_MACHINES)]
        self.references: dict[tuple[int, int], Reference] = {}
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # torch's objects are many, and none of them goes
        self.stack.enter_context(in_memory())
        self.stack.enter_context(self.disks.in_use())
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()
        gc.unfreeze()

    def run(self, plan: Plan) -> Cluster:
        """Run a plan to its end; `check` it then."""
        self.disks.full.clear()
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        cluster = Cluster(plan, self.identities, self.folder / "run", self.disks, self.pool)
        cluster.run()
        return cluster

    def reference(self, plan: Plan) -> Reference:
        """Return what a run of the same shape commits to which nothing happens."""
        key = plan.shape.stages, plan.shape.replicas
        if key not in self.references:
            self.references[key] = undisturbed(replace(plan.shape, steps=MOST_STEPS).config)
        return self.references[key]

    def problem(self, seed: int) -> str | None:
        """Say what is wrong with the run of a seed; None: nothing."""
        plan = make_plan(seed)
        reference = self.reference(plan)
        try:
            check(self.run(plan), reference)
        except AssertionError as error:
            return f"seed {seed}: {error}"
        return None

    def problems(self, seeds: Iterable[int]) -> list[str]:
        """Say what is wrong with those of some seeds with which something is."""
        return [problem for seed in seeds if (problem := self.problem(seed)) is not None]


def main(first: int, last: int | None = None) -> None:
    """Run one seed, or many."""
    with tempfile.TemporaryDirectory() as folder, Runner(Path(folder)) as runner:
        if last is not None:
            print(*runner.problems(range(first, last)), sep="\n")
            return
        plan = make_plan(first)
        cluster = Cluster(plan, runner.identities, Path(folder) / "one", runner.disks, runner.pool)
        reference = runner.reference(plan)
        try:
            cluster.run()
            check(cluster, reference)
        finally:
            print(plan, *cluster.world.trace, sep="\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
