"""The three protocols of a pipeline: every implementation keeps the contracts, and wrong ones do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jobs import BATCH, CPU, EIGHT, link_pipeline, run_config
from link.support import World, pair
from pipeline.contracts import check_abandon, check_backups, check_compute, check_group, observe, together
from thinwire.checkpoint.hashes import file_sha256
from thinwire.cluster.backups import Copies
from thinwire.cluster.neighbours import Neighbours
from thinwire.cluster.places import Places
from thinwire.cluster.scratch import free_ports
from thinwire.config.sections import ReplicasConfig, RunConfig
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.identity import Identity
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.roster import Roster
from thinwire.pipeline.alone import GroupAlone
from thinwire.pipeline.control import Control
from thinwire.pipeline.inprocess import Pipeline, build_pipeline
from thinwire.pipeline.links import Links, join_group
from thinwire.pipeline.outcome import Outcome
from thinwire.pipeline.protocols import Group
from thinwire.run.keeping import Keeper

STAGES = 2
CODECS = {
    "moves its basis": {"name": "subspace", "rank": 6, "drift_every": 2},
    "shares parameters": {"name": "anchored", "rank": 6, "projector": "learned", "projector_every": 2},
    "shares nothing": {"name": "dense"},
}


def config_of(codec: str) -> RunConfig:
    return run_config(STAGES, "auto", CODECS[codec])


def batch() -> torch.Tensor:
    return torch.randint(EIGHT.vocabulary, (BATCH, EIGHT.context + 1), generator=torch.Generator().manual_seed(5))


def check(seen: Sequence[dict], codec: str) -> None:
    check_compute(seen, STAGES, moves=codec == "moves its basis", shares=codec == "shares parameters")


def observe_over_links(config: RunConfig, index: int, roster: Roster, identity: Identity) -> dict:
    """Be one worker."""
    with link_pipeline(config, index, roster, identity) as opened:
        return observe(opened.compute, batch() if index == 0 else None, BATCH, EIGHT.context)


@pytest.mark.parametrize("codec", CODECS)
def test_stages_in_one_process_compute_as_promised(codec):
    check([observe(build_pipeline(config_of(codec), CPU), batch(), BATCH, EIGHT.context)], codec)


@pytest.mark.parametrize("codec", CODECS)
def test_stages_over_links_compute_as_promised(pool, identities, codec):
    roster = grid_roster(identities, 1, STAGES)
    seen = pool.run(observe_over_links, [(config_of(codec), stage, roster, identities[stage]) for stage in range(STAGES)])
    check(seen, codec)


class Silent(Pipeline):
    def step(self, *given):
        super().step(*given)


class Hasty(Pipeline):
    def step(self, *given):
        loss = super().step(*given)
        next(self.stages[0].parameters()).data.mul_(2)
        return loss


class Forgetful(Pipeline):
    def step(self, *given):
        for stage in self.stages:
            stage.zero_grad(set_to_none=True)
        return super().step(*given)


class Learning(Pipeline):
    def evaluate(self, batch_BT1, rows=None, step=0):
        return super().step(batch_BT1, step, 0)


class Unmoved(Pipeline):
    def update_shared(self, step, rate_factor):
        return []


class Deep(Pipeline):
    def bound_in_flight(self, limits):
        return [4] * len(self.stages)


class Uncounted(Pipeline):
    def totals(self):
        return [each | {"boundary": None} for each in super().totals()]


@pytest.mark.parametrize("wrong", [Silent, Hasty, Forgetful, Learning, Unmoved, Deep, Uncounted])
def test_wrong_computing_is_found(wrong):
    pipeline = build_pipeline(config_of("moves its basis"), CPU)
    pipeline.__class__ = wrong
    with pytest.raises(AssertionError):
        check([observe(pipeline, batch(), BATCH, EIGHT.context)], "moves its basis")


# Groups ---------------------------------------------------------------------------------------------------------------------------------


def grid_roster(identities: list[Identity], replicas: int, stages: int) -> Roster:
    worker_ids = [WorkerId(replica, stage) for replica in range(replicas) for stage in range(stages)]
    named = zip(worker_ids, identities, free_ports(len(worker_ids)), strict=False)
    return Roster.of(Worker(worker_id, identity.certificate, f"127.0.0.1:{port}") for worker_id, identity, port in named)


@contextlib.contextmanager
def groups_over_links(identities: list[Identity], replicas: int, stages: int) -> Iterator[list[Group]]:
    """Join workers in threads of this process."""
    config = replace(run_config(stages, "auto", {"name": "dense"}), replicas=ReplicasConfig(count=replicas))
    roster = grid_roster(identities, replicas, stages)
    everyone = [
        Neighbours(config, Places(roster), Endpoint(identity), worker_id, "test")
        for worker_id, identity in zip(roster.workers, identities, strict=False)
    ]

    def join(neighbours: Neighbours) -> Group:
        links = neighbours.open(dict.fromkeys((*neighbours.sides.values(), *neighbours.in_replicas.values()), Contract()))
        return join_group(config, neighbours.worker_id, links, neighbours.interrupt)

    try:
        yield together(everyone, join)
    finally:
        together(everyone, Neighbours.close)


SHAPES = {"two stages": (1, 2), "three stages": (1, 3), "three replicas": (3, 1), "two replicas of two stages": (2, 2)}


def test_a_process_alone_agrees_with_itself():
    check_group([GroupAlone()], stages=1)
    check_abandon([GroupAlone()])


@pytest.mark.parametrize("shape", SHAPES)
def test_workers_agree_over_links(identities, shape):
    replicas, stages = SHAPES[shape]
    with groups_over_links(identities, replicas, stages) as groups:
        check_group(groups, stages)
        check_abandon(groups)


class Deaf(GroupAlone):
    def gather(self, own, form=None):
        return []


class Inventive(GroupAlone):
    def announce(self, facts, form=None):
        return {"worker": 1}


class Stubborn(GroupAlone):
    def settle(self, own, *, meeting=True, alike=False):
        return replace(own, stop=False)


class Busy(GroupAlone):
    """Concerns itself with checkpoints where nobody is met."""

    def settle(self, own, *, meeting=True, alike=False):
        return own


class Patient(GroupAlone):
    def abandon(self):
        pass


@pytest.mark.parametrize("wrong", [Deaf, Inventive, Stubborn, Busy])
def test_wrong_agreement_is_found(wrong):
    with pytest.raises(AssertionError):
        check_group([wrong()], stages=1)


def test_one_who_does_not_give_up_is_found():
    with pytest.raises(AssertionError):
        check_abandon([Patient()])


def test_the_forms_of_messages_are_those_of_outcomes(identities):
    """Every field survives the way through a link."""
    said = Outcome(3, 0.5, 2.0, True, 0.25, 0.125, (1, 2), (1,), (2,), True, 1, 1, True)
    with groups_over_links(identities, 1, 2) as groups:
        first, second = together(
            groups, lambda group: group.settle(said if group.number else Outcome(3, None, 0.0, saved=(1, 2), copied=(1,)))
        )
    assert first == second == replace(said, replicas=1)


# Backups --------------------------------------------------------------------------------------------------------------------------------


def keeper_of(folder: Path, index: int, backups: Copies | None) -> Keeper:
    stage = SimpleNamespace(plan=SimpleNamespace(index=index))
    return Keeper(run_config(2, "auto", {"name": "dense"}), folder, [stage], {"split": "4,4", "microbatches": 1}, backups)


def write_part(keeper: Keeper, step: int) -> str:
    """Put the files of a process's part of a checkpoint in place."""
    (index,) = keeper.saver.indices
    folder = keeper.folder / f"checkpoints/step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"stage-{index}.safetensors").write_bytes(bytes([index + step]) * 1000)
    (folder / f"stage-{index}.json").write_text(f'{{"sha256": "{file_sha256(folder / f"stage-{index}.safetensors")}"}}')
    return folder.name


def lose_part(keeper: Keeper, name: str) -> None:
    for path in (keeper.folder / "checkpoints" / name).iterdir():
        path.unlink()


@contextlib.contextmanager
def machines(folder: Path) -> Iterator[list[Keeper]]:
    """Join two machines that keep copies for each other."""
    with pair(World(folder)) as ends:
        left, right = ends[:2]
        groups = [Control(None, left, number=0, workers=2), Control(right, None, number=1, workers=2)]
        sides = [Links(None, left, {}), Links(right, None, {})]
        copies = [Copies(folder / str(index), index, 2, sides[index], 10**4, groups[index]) for index in range(2)]
        for each in copies:
            each.open()
        try:
            yield [keeper_of(folder / str(index), index, copies[index]) for index in range(2)]
        finally:
            for each in (left, right, *copies):
                each.close()


def test_machines_keep_copies_for_each_other(tmp_path):
    with machines(tmp_path) as keepers:
        check_backups(keepers, write_part, lose_part)
        contents = [
            (keeper.folder / f"checkpoints/step-000004/stage-{index}.safetensors").read_bytes() for index, keeper in enumerate(keepers)
        ]
    assert contents == [bytes([4]) * 1000, bytes([5]) * 1000]


def test_where_nobody_keeps_copies_none_is_missing_and_none_comes_back(tmp_path):
    check_backups([keeper_of(tmp_path / str(index), index, None) for index in range(2)], write_part, lose_part)


@pytest.mark.parametrize("method, wrong", [("held", dict), ("fetch", lambda *given: None), ("confirm", lambda *given: None)])
def test_wrong_backups_are_found(tmp_path, monkeypatch, method, wrong):
    monkeypatch.setattr(Copies, method, lambda self, *given: wrong())
    with pytest.raises(AssertionError), machines(tmp_path) as keepers:
        check_backups(keepers, write_part, lose_part)
