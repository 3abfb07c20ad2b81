"""Optimizer state in slow memory between updates: the same weights, bit for bit, and nothing that outlives a broken disk unnoticed."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace

import pytest
import torch

from helpers import random_ids
from memory.forced import full_disk
from memory.limited import tiny
from runs import train
from thinwire.checkpoint import weights_sha256
from thinwire.config.sections import RunConfig
from thinwire.memory.account import Live, scratch_bytes
from thinwire.memory.attach import MemoryBudget, limit
from thinwire.memory.blocks import Plan, Profile, alike, base_bytes, floor_bytes
from thinwire.memory.measure import measure_stage
from thinwire.memory.offload import worth_moving
from thinwire.memory.plan import make_plan, minimum
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import Pipeline, build_pipeline

OPTIMIZERS = ("shared", "adamw", "muon")


def trained(config: RunConfig, steps: int, folder=None) -> tuple[Pipeline, list[StageOptimizer], MemoryBudget]:
    """Train a little, with optimizer state in slow memory if a folder is given."""
    pipeline, memory = build_pipeline(config, torch.device("cpu")), MemoryBudget()
    optimizers = [StageOptimizer(stage, config.train) for stage in pipeline.stages]
    if folder is not None:
        config = replace(config, memory=replace(config.memory, budget="1GB", folder=str(folder)))
        for stage, optimizer in zip(pipeline.stages, optimizers, strict=True):
            profile = measure_stage(stage, pipeline.codec, config, folder)
            plan = Plan(("keep",) * len(profile.blocks), 1, 0, 1.0, 1.0, optimizer_out=True)
            memory.stages.append(limit(stage, optimizer, pipeline.codec, config, profile, plan, 1, folder))
    for step in range(steps):
        pipeline.step(random_ids(config.model, 4, seed=step), step, 4 * step)
        for optimizer in optimizers:
            optimizer.step(1.0, 0.5)
    return pipeline, optimizers, memory


def resident(optimizers: list[StageOptimizer]) -> int:
    """Return the bytes of state that are in memory."""
    states = [state for mine in optimizers for each in mine.optimizers for state in each.state.values()]
    return sum(tensor.untyped_storage().nbytes() for state in states for tensor in state.values())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("codec", ["dense", "subspace"])
def test_the_same_weights_and_state(tmp_path, codec, kind):
    config = tiny(codec, vocabulary=997)
    config = replace(config, train=replace(config.train, optimizer=kind))
    plain, before, _ = trained(config, 3)
    out, after, memory = trained(config, 3, tmp_path)
    whole = resident(before)
    assert resident(after) < 0.2 * whole  # what is small stays
    assert weights_sha256(out.stages) == weights_sha256(plain.stages)
    memory.close()
    assert resident(after) == whole and all(optimizer.offload is None for optimizer in after)
    for mine, theirs in zip(before, after, strict=True):
        one, two = mine.state_tensors(), theirs.state_tensors()
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_checkpoint_brings_it_back_and_the_next_step_sends_it_out(tmp_path):
    config = tiny(vocabulary=997)
    pipeline, optimizers, memory = trained(config, 1, tmp_path)
    out = resident(optimizers)
    for optimizer in optimizers:
        optimizer.state_tensors()
    assert resident(optimizers) > 3 * out
    pipeline.step(random_ids(config.model, 4, seed=1), 1, 4)
    assert resident(optimizers) == out
    memory.close()


def test_a_disk_that_fails_takes_no_state_for_whole(tmp_path, monkeypatch):
    _, optimizers, memory = trained(tiny(vocabulary=997), 1, tmp_path)

    def broken(*given):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ValueError, match="Input/output error"):
        optimizers[0].state_tensors()
    monkeypatch.undo()
    memory.close()
    with pytest.raises(ValueError, match=r"cannot read|closed"):  # not even afterwards
        optimizers[0].state_tensors()


def test_a_full_disk_leaves_the_state_in_memory(tmp_path, monkeypatch):
    config = tiny(vocabulary=997)
    pipeline, optimizers, memory = trained(config, 1, tmp_path)
    for optimizer in optimizers:
        optimizer.state_tensors()
    whole = resident(optimizers)
    monkeypatch.setattr(os, "pwrite", full_disk(0))
    with pytest.raises(ValueError, match="No space left on device"):
        pipeline.step(random_ids(config.model, 4, seed=1), 1, 4)
    assert resident(optimizers) == whole
    memory.close()


WIDE = ("--model.width", "128", "--model.ffn", "512", "--train.batch", "2", "--train.steps", "3", "--pipeline.stages", "1")
WIDE += ("--codec.name", "dense", "--pipeline.microbatches", "2", "--train.checkpoint_every", "2")


def test_the_planner_takes_this_way_when_nothing_else_fits(config, tmp_path, capsys):
    plain = train(config, tmp_path / "plain", *WIDE)
    with pytest.raises(AssertionError):
        train(config, tmp_path / "less", *WIDE, "--memory.budget", "1MB")
    found = re.search(r"--memory\.budget ([\d.]+MB)", capsys.readouterr().err)
    assert found
    tight = train(config, tmp_path / "tight", *WIDE, "--memory.budget", found[1])
    assert tight["weights_sha256"] == plain["weights_sha256"]
    (memory,) = tight["memory"]
    assert (
        memory["optimizer_out"]
        and memory["planned_peak"] >= memory["parameters"] + memory["optimizer"]
        and memory["peak"] <= memory["budget"]
    )
    assert memory["budget"] < memory["parameters"] + memory["gradients"] + memory["optimizer"]
    resumed = train(config, tmp_path / "tight", *WIDE, "--memory.budget", found[1], "--resume", "--train.steps", "5")
    longer = train(config, tmp_path / "longer", *WIDE, "--train.steps", "5")
    assert resumed["weights_sha256"] == longer["weights_sha256"]


def measured(config: RunConfig, folder, index: int = 1) -> tuple[Pipeline, Profile]:
    pipeline = build_pipeline(config, torch.device("cpu"))
    return pipeline, measure_stage(pipeline.stages[index], pipeline.codec, config, folder)


def test_the_minimum_counts_what_a_checkpoint_needs(tmp_path):
    _, profile = measured(tiny(vocabulary=997, width=128, ffn=512), tmp_path)
    saving = profile.fixed_bytes - profile.kinds["gradients"] - profile.kinds["working memory"]
    assert saving == profile.slim_between_bytes <= minimum(profile) < minimum(replace(profile, optimizer_bytes=0))
    assert profile.slim.fixed_bytes == profile.fixed_bytes - profile.optimizer_bytes == sum(profile.slim.kinds.values())
    assert 0 < profile.slim.kinds["optimizer"] < 0.2 * profile.kinds["optimizer"]  # what is small stays


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_minimum_counts_the_update_of_one_large_parameter(tmp_path, kind):
    """The first stage is almost all embedding: its state comes back as a whole, which is more than the activations that have gone."""
    config = tiny("dense", vocabulary=40_000)
    config = replace(config, train=replace(config.train, optimizer=kind))
    _, profile = measured(config, tmp_path, index=0)
    slim = profile.slim
    floor = base_bytes(slim, 1) + floor_bytes(slim.blocks, alike("offload", len(slim.blocks)))
    assert floor < minimum(profile) == slim.between(1)  # without the update it would have been less
    plan = make_plan(profile, minimum(profile))
    assert plan.optimizer_out and plan.most_bytes == minimum(profile)
    with pytest.raises(ValueError, match="between steps"):
        make_plan(profile, minimum(profile) - 1)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_an_update_takes_is_what_was_predicted(tmp_path, kind):
    config = tiny("subspace", vocabulary=997)
    config = replace(config, train=replace(config.train, optimizer=kind))
    pipeline, optimizers, memory = trained(config, 1, tmp_path)
    optimizer = optimizers[1]
    pipeline.step(random_ids(config.model, 4, seed=1), 1, 4)
    stage = pipeline.stages[1]
    there = [*stage.parameters(), *(parameter.grad for parameter in stage.parameters()), *stage.buffers()]
    states = [tensor for each in optimizer.optimizers for state in each.state.values() for tensor in state.values()]
    with Live(there + [tensor for tensor in states if tensor.numel()]) as live:  # beside what is small and stays
        optimizer.step(1.0, 0.5)
    sizes, scratch = optimizer.state_sizes(), scratch_bytes(stage, config.train)
    predicted = max(mine + sum(worth_moving([each])) for mine, each in zip(scratch, sizes, strict=True))
    assert 0.95 * predicted < live.peak <= predicted
    memory.close()
