"""Workers in one process over a network in memory, with everything that goes wrong drawn from a seed (docs/reliability.md).

Links, neighbours, vote, commit, watch, standbys, recovery and checkpoints are the product's own. `runner.py` shows the trace of a seed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulation.check import (
    check,
    check_content,
    check_end,
    check_epochs,
    check_files,
    check_gradients,
    check_holders,
    check_order,
    check_stop,
)
from simulation.cluster import Cluster, Commit
from simulation.plan import MOST_STEPS, Plan, Shape, make_plan
from simulation.runner import MOST_MACHINES, Runner
from simulation.scheduler import Machine, Stuck, World
from thinwire.link.peer import WorkerId

CHUNK = 25
FULL_CHUNK = 100
REPEATED = (0, 3, 11, 18)
"""Seeds whose runs have crashes, standbys, replicas and a supervisor between them."""


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_nothing_wrong_whatever_happens(tmp_path: Path, first: int) -> None:
    with Runner(tmp_path) as runner:
        assert runner.problems(range(first, first + CHUNK)) == []


@pytest.mark.full
@pytest.mark.parametrize("first", range(200, 10_000, FULL_CHUNK))
def test_nothing_wrong_whatever_else_happens(tmp_path: Path, first: int) -> None:
    with Runner(tmp_path) as runner:
        assert runner.problems(range(first, first + FULL_CHUNK)) == []


@pytest.mark.parametrize("seed", REPEATED)
def test_same_seed_same_trace(tmp_path: Path, seed: int) -> None:
    with Runner(tmp_path) as runner:
        first, second = (runner.run(make_plan(seed)).world.trace for _ in range(2))
    assert first == second
    assert len(first) > 10


def test_other_seed_other_trace(tmp_path: Path) -> None:
    with Runner(tmp_path) as runner:
        first, second = (runner.run(replace(calm_plan(), seed=seed)).world.trace for seed in range(2))
    assert first != second


def calm_plan() -> Plan:
    shape = Shape(stages=3, replicas=1, steps=MOST_STEPS, every=2)
    return Plan(0, shape, standbys=0, supervised=False, faults=(), clocks=((0.0, 1.0),) * MOST_MACHINES)


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Cluster, dict[tuple[WorkerId, int], str]]:
    with Runner(tmp_path) as runner:
        reference = runner.reference(calm_plan())
        cluster = runner.run(calm_plan())
        check(cluster, reference)
    return cluster, reference


def test_undisturbed_run_commits_every_step_once(finished) -> None:
    cluster, reference = finished
    assert len(cluster.commits) == len(reference) == 3 * MOST_STEPS
    assert [host.ended for host in cluster.hosts] == [f"done at step {MOST_STEPS}"] * 3


def test_a_commit_that_comes_too_early_is_found(finished) -> None:
    cluster, _ = finished
    cluster.committed("replica 0 stage 0 #1", WorkerId(0, 0), 0, MOST_STEPS, "")
    with pytest.raises(AssertionError, match="came too early"):
        check_gradients(cluster)


def test_another_content_is_found(finished) -> None:
    cluster, reference = finished
    cluster.commits.append(replace(cluster.commits[-1], content="00"))
    with pytest.raises(AssertionError, match="not what an undisturbed run commits"):
        check_content(cluster, reference)


def add_twin(cluster: Cluster, commit: Commit, seconds: float, epoch: int) -> None:
    """Let another process of the same place commit the same step later on."""
    cluster.processes["twin"] = cluster.processes[commit.process]
    cluster.commits.append(replace(commit, process="twin", at=commit.at + seconds, epoch=epoch))


def test_two_holders_in_an_epoch_are_found(finished) -> None:
    cluster, _ = finished
    first: Commit = cluster.commits[0]
    cluster.commits.append(replace(first, partners=tuple((place, 0) for place, _ in first.partners)))
    with pytest.raises(AssertionError, match="worked in epoch 0 with two processes of replica 0 stage 1"):
        check_holders(cluster)


def test_two_holders_in_turns_are_found(finished) -> None:
    cluster, _ = finished
    add_twin(cluster, cluster.commits[0], 0.01, epoch=0)
    with pytest.raises(AssertionError, match="took turns"):
        check_holders(cluster)


def test_a_later_epoch_may_have_another_holder(finished) -> None:
    cluster, _ = finished
    add_twin(cluster, cluster.commits[-1], 100.0, epoch=1)
    check_holders(cluster)


def test_who_begins_anew_may_use_the_first_epoch_again(finished) -> None:
    cluster, _ = finished
    add_twin(cluster, cluster.commits[-1], 100.0, epoch=0)
    check_holders(cluster)


def test_epoch_after_epoch_is_found(finished) -> None:
    cluster, _ = finished
    cluster.hear("replica 0 stage 0 #1", {"abandoned": 0, "epoch": 5})
    with pytest.raises(AssertionError, match="6 epochs were abandoned"):
        check_epochs(cluster)


def test_a_step_that_is_left_out_is_found(finished) -> None:
    cluster, _ = finished
    first: Commit = cluster.commits[0]
    cluster.commits.remove(next(commit for commit in cluster.commits if (commit.place, commit.step) == (first.place, 1)))
    with pytest.raises(AssertionError, match="committed the steps"):
        check_order(cluster)


def test_another_checkpoint_is_found(finished) -> None:
    cluster, reference = finished
    (folder,) = cluster.hosts[0].folder.glob(f"checkpoints/step-{MOST_STEPS:06d}")
    folder.rename(folder.with_name("step-000001"))
    with pytest.raises(AssertionError, match="holds something else than step 1"):
        check_files(cluster, reference)


def test_a_run_that_does_not_finish_is_found(finished) -> None:
    cluster, _ = finished
    for host in cluster.hosts:
        host.summary = None
    with pytest.raises(AssertionError, match="nobody reached the last step"):
        check_end(cluster)


def test_an_end_at_different_steps_is_found(finished) -> None:
    cluster, _ = finished
    cluster.hosts[1].summary = {"steps": 2}
    with pytest.raises(AssertionError, match="ended at different steps"):
        check_stop(cluster)


def test_a_worker_that_says_nothing_is_found(finished) -> None:
    cluster, _ = finished
    cluster.hosts[1].ended = None
    with pytest.raises(AssertionError, match="did not say how it ended"):
        check_end(cluster)


def test_deadlock_is_found() -> None:
    world = World(0)
    machine = Machine(world, "machine")
    machine.thread("main", lambda: machine.event().wait()).start()
    with pytest.raises(Stuck, match="deadlock"):
        world.run()


def test_endless_loop_is_found() -> None:
    world = World(0)
    machine = Machine(world, "machine")

    def turn() -> None:
        while True:
            machine.sleep(1.0)

    machine.thread("main", turn).start()
    with pytest.raises(Stuck, match="no end"):
        world.run()
