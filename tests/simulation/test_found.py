"""What the simulation has found, each as the plan that showed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.check import check
from simulation.plan import Fault, Plan, Shape
from simulation.runner import MOST_MACHINES, Runner

CLOCKS = ((0.0, 1.0),) * MOST_MACHINES


def test_a_connection_lost_while_links_are_measured(tmp_path: Path) -> None:
    """The echoes under way were lost with it; the worker waited for them for 30 s, and then ended with a TimeoutError."""
    shape = Shape(stages=3, replicas=1, steps=3, every=1)
    with Runner(tmp_path) as runner:
        for hundredth in range(3, 15):
            fault = Fault(hundredth / 100, "reset", machine=1, other=0, seconds=0.1)
            plan = Plan(hundredth, shape, standbys=0, supervised=False, faults=(fault,), clocks=CLOCKS)
            cluster = runner.run(plan)
            check(cluster, runner.reference(plan))
            assert cluster.world.now < 20


@pytest.mark.parametrize("machine", range(4))
def test_a_replaced_process_ends(tmp_path: Path, machine: int) -> None:
    """One neighbour told it so, its other links that the epoch was over: it went on through epoch after epoch."""
    shape = Shape(stages=2, replicas=2, steps=5, every=2)
    with Runner(tmp_path) as runner:
        for tenth in range(3, 15):
            fault = Fault(0.4, "twin", machine, other=0, seconds=tenth / 5)
            plan = Plan(tenth, shape, standbys=0, supervised=False, faults=(fault,), clocks=CLOCKS)
            check(runner.run(plan), runner.reference(plan))
