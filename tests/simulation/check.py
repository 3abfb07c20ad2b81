"""What must hold after every run, whatever has happened."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, permutations, product
from pathlib import Path

from safetensors.numpy import load_file

from simulation.cluster import Cluster, Commit
from thinwire.link.peer import WorkerId

Reference = dict[tuple[WorkerId, int], str]
"""The weights of every place after every step of a run to which nothing happens, the steps counted from 0."""
MET_SECONDS = 1.0
"""When a process has begun so long ago, the others have met it."""


def check(cluster: Cluster, reference: Reference) -> None:
    """Raise AssertionError for what must never happen."""
    check_content(cluster, reference)
    check_gradients(cluster)
    check_holders(cluster)
    check_replaced(cluster)
    check_order(cluster)
    check_epochs(cluster)
    check_files(cluster, reference)
    check_end(cluster)
    check_stop(cluster)


def check_content(cluster: Cluster, reference: Reference) -> None:
    """A step is the same wherever, and however often, it is committed."""
    for commit in cluster.commits:
        assert commit.content == reference[commit.place, commit.step], f"{commit} is not what an undisturbed run commits"


def check_gradients(cluster: Cluster) -> None:
    """A step is committed when everybody has its gradients of it: whoever is behind can follow."""
    for commit in cluster.commits:
        assert not commit.missing, f"{commit} came too early"


def check_replaced(cluster: Cluster) -> None:
    """A process of which the others have met a newer one takes part in no later epoch, if there was only one before."""
    kinds, slept = {fault.kind for fault in cluster.plan.faults}, [fault.seconds for fault in cluster.plan.faults if fault.kind == "twin"]
    if kinds <= {"twin", "reset"} and len(slept) == 1 and slept[0] > MET_SECONDS:
        for commit in cluster.commits:
            assert not commit.epoch or commit.process not in cluster.replaced, f"{commit} is of a process that was replaced"


def check_holders(cluster: Cluster) -> None:
    """In an epoch a process works with one process of each place; and of two that have a place at the same time only one goes on."""
    met: dict[tuple[str, int, WorkerId], set[int | None]] = defaultdict(set)
    for commit in cluster.commits:
        for partner, number in commit.partners:
            met[commit.process, commit.epoch, partner].add(number)
    for (process, epoch, partner), numbers in met.items():
        assert len(numbers) == 1, f"{process} worked in epoch {epoch} with two processes of {partner}: {sorted(map(str, numbers))}"
    for first, second in permutations(cluster.processes, 2):
        one, other = cluster.processes[first], cluster.processes[second]
        if one.born < other.node.ended_at and other.born < one.node.ended_at:
            mine, theirs = ([commit for commit in cluster.commits if commit.process == process] for process in (first, second))
            assert not went_back(mine, theirs), f"{first} and {second} took turns: {mine} {theirs}"


def went_back(mine: list[Commit], theirs: list[Commit]) -> bool:
    """Tell whether a process commits before and after another one of its place, and not merely what it still had of an earlier epoch."""
    return any(
        before.at < between.at < after.at and before.epoch <= between.epoch <= after.epoch
        for before, between, after in product(mine, theirs, mine)
        if before.place == between.place == after.place
    )


def check_epochs(cluster: Cluster) -> None:
    """What happens once does not end epoch after epoch."""
    limit = 2 * len(cluster.plan.faults) + 2  # each neighbour may find out by itself, and a newcomer counts from 0
    assert cluster.epochs <= limit, f"{cluster.epochs} epochs were abandoned"


def check_order(cluster: Cluster) -> None:
    """In an epoch a process commits one step after the other."""
    steps = defaultdict(list)
    for commit in cluster.commits:
        steps[commit.process, commit.epoch].append(commit.step)
    for who, found in steps.items():
        assert all(after == before + 1 for before, after in pairwise(found)), f"{who} committed the steps {found}"


def check_files(cluster: Cluster, reference: Reference) -> None:
    """Checkpoints, and copies of them, hold committed steps and nothing else."""
    for folder in {host.folder for host in cluster.hosts}:
        for manifest in folder.glob("c*/step-*/stage-*.json"):
            step, stage = int(manifest.parent.name.removeprefix("step-")), int(manifest.stem.removeprefix("stage-"))
            weights = load_file(manifest.with_suffix(".safetensors"))[f"layers.{stage}.weight"].tobytes().hex()
            # Replicas that average their gradients are alike.
            assert not step or weights == reference[WorkerId(0, stage), step - 1], f"{manifest} holds something else than step {step}"


def check_end(cluster: Cluster) -> None:
    """Whoever was not lost has said how it ended; a run to which only passing things happen reaches its last step."""
    for host in cluster.hosts:
        silent = not host.ended and not host.lost and not cluster.is_needless(host)
        assert not silent, f"{host.process} did not say how it ended"
    steps = cluster.config.train.steps
    finished = [host for host in cluster.hosts if host.summary is not None and host.summary["steps"] == steps]
    assert finished or not cluster.plan.must_finish(cluster.begun_at), (
        f"nobody reached the last step: {[host.ended for host in cluster.hosts]}"
    )
    if finished and not any(fault.disk or fault.kind in ("full disk", "lose") for fault in cluster.plan.faults):
        for place in cluster.roster.workers:
            assert any(holds(host.folder, place.stage, steps) for host in cluster.hosts), f"nobody has the last step of {place}"


def check_stop(cluster: Cluster) -> None:
    """Where nothing happens but that someone ends the run, all end at the same step."""
    faults = cluster.plan.faults
    if all(fault.kind in ("stop", "stop now") and fault.at > cluster.begun_at for fault in faults):  # who comes later meets nobody
        steps = {str(host.listed): host.summary and host.summary["steps"] for host in cluster.hosts[: cluster.plan.workers]}
        assert len(set(steps.values())) == 1, f"the run was ended at different steps: {steps}"


def holds(folder: Path, stage: int, step: int) -> bool:
    """Tell whether a folder has a stage's part of a checkpoint, or a copy of it."""
    return any(folder.glob(f"c*/step-{step:06d}/stage-{stage}.json"))
