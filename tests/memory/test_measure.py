"""Measuring a stage: what it finds, how little memory it takes, and that it leaves no trace."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import random_ids
from memory.limited import FAST, Limited, tiny
from thinwire.config.sections import MemoryConfig
from thinwire.memory.account import Live, always_there, tensor_bytes, wire_of
from thinwire.memory.measure import make_profile, observe, profile_stage, slow_folder
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import build_codec, build_pipeline


def digest(stage: torch.nn.Module) -> str:
    total = hashlib.sha256()
    for name, tensor in stage.state_dict().items():
        total.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("codec", ["dense", "subspace", "threshold", "anchored", "autoencoder"])
@pytest.mark.parametrize("index", [0, 1])
def test_it_leaves_no_trace(codec, index):
    config = tiny(codec, dropout=0.1)
    built = build_codec(config)
    stage = build_stage(config.model, cut_layers(4, 2, "1,3"), index, built, 3)
    weights, state, ends = digest(stage), torch.get_rng_state(), (stage.runner, stage.entries, stage.exits)
    attributes = [dict(vars(module)) for module in stage.exits.modules()]
    make_profile(stage, built, config, FAST)
    assert digest(stage) == weights and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in stage.parameters())
    assert (stage.runner, stage.entries, stage.exits) == ends
    for module, before in zip(stage.exits.modules(), attributes, strict=True):
        assert {name: value for name, value in vars(module).items() if isinstance(value, int | float)} == {
            name: value for name, value in before.items() if isinstance(value, int | float)
        }


def test_blocks_of_a_stage():
    config = tiny()
    profile = Limited(config).profile
    assert [block.name for block in profile.blocks] == ["layer 1", "layer 2", "layer 3", "head"]
    for block in profile.blocks:
        assert block.forward_seconds > 0 and block.backward_seconds > 0
        assert block.input_bytes == 2 * config.model.context * config.model.width * 4
    layers, head = profile.blocks[:3], profile.blocks[3]
    assert len({(block.saved_bytes, block.parameter_bytes) for block in layers}) == 1
    # The head keeps at least the logarithms of all probabilities.
    assert head.saved_bytes > 2 * config.model.context * config.model.vocabulary * 4
    assert profile.microbatches == 2 and profile.bandwidth == FAST
    assert (
        profile.fixed_bytes == sum(profile.kinds.values()) and 0 < profile.optimizer_bytes < profile.kinds["optimizer"]
    )  # what is small stays


def test_dropout_shows_in_the_bytes():
    plain, noisy = Limited(tiny()).profile, Limited(tiny(dropout=0.1)).profile
    assert noisy.blocks[0].saved_bytes > plain.blocks[0].saved_bytes


def test_one_block_is_in_memory_at_a_time():
    limited = Limited(tiny())
    whole = sum(block.all_bytes for block in limited.profile.blocks)
    with Live([*limited.stage.parameters(), *limited.stage.buffers()]) as live:
        observe(limited.stage, limited.codec, limited.config, 2)
    largest = max(block.all_bytes for block in limited.profile.blocks)
    parameters = tensor_bytes(list(limited.stage.parameters()))
    assert live.peak < largest + limited.profile.kinds["working memory"] + 2 * parameters < whole + 2 * parameters + 2**20


@pytest.mark.parametrize("optimizer", ["shared", "adamw", "muon"])
@pytest.mark.parametrize("codec", ["dense", "subspace"])
def test_what_is_always_there_is_what_a_step_leaves(codec, optimizer):
    config = tiny(codec)
    config = replace(config, train=replace(config.train, optimizer=optimizer))
    pipeline = build_pipeline(config, torch.device("cpu"))
    optimizers = [StageOptimizer(stage, config.train) for stage in pipeline.stages]
    pipeline.step(random_ids(config.model, 4), 0, 0)
    for stage, mine in zip(pipeline.stages, optimizers, strict=True):
        kinds = always_there(stage, pipeline.codec, config)
        assert kinds["gradients"] == tensor_bytes([p.grad for p in stage.parameters() if p.grad is not None])
        mine.step(1.0, 1.0)
        assert kinds["optimizer"] == sum(tensor.nbytes for tensor in mine.state_tensors().values())


def test_buffers_of_the_wire():
    """Engine buffers for all microbatches of a step in workers; in one process only what is under way."""
    config = tiny()
    limited = Limited(config)
    payload, ids = 2 * 12 * 32 * 2, 2 * 13 * 4  # bf16 on the wire
    assert wire_of(limited.stage, limited.codec, config).fixed_bytes == 0
    assert wire_of(limited.stage, limited.codec, config).flight_bytes == payload + ids + 2 * payload
    workers = replace(config, pipeline=replace(config.pipeline, mode="workers"))
    wire = wire_of(limited.stage, limited.codec, workers)
    assert wire.fixed_bytes == 2 * (payload + ids) and wire.flight_bytes == 2 * payload
    first = build_stage(config.model, cut_layers(4, 2, "1,3"), 0, limited.codec, 3)
    assert wire_of(first, limited.codec, workers).fixed_bytes == 2 * payload


def test_profile_of_a_config(tmp_path):
    profile = profile_stage(tiny("subspace"), 0, torch.device("cpu"), tmp_path)
    assert [block.name for block in profile.blocks] == ["layer 0"]
    assert min(profile.bandwidth.out_bytes_per_second, profile.bandwidth.in_bytes_per_second) > 0 and not profile.bandwidth.duplex
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"there is no stage 2.*choose 0 to 1"):
        profile_stage(tiny(), 2, torch.device("cpu"), tmp_path)


def test_where_slow_memory_goes(tmp_path):
    config = tiny()
    assert slow_folder(config, tmp_path / "runs/one") == tmp_path  # nothing is made before the run is sure to start
    named = replace(config, memory=MemoryConfig(folder=str(tmp_path)))
    assert slow_folder(named, Path("runs/one")) == tmp_path
    with pytest.raises(ValueError, match="is no folder; make it"):
        slow_folder(replace(config, memory=MemoryConfig(folder=str(tmp_path / "none"))), tmp_path)


def test_live_bytes():
    weight = torch.zeros(100, requires_grad=True)
    with Live([weight]) as live:
        one = weight * 2
        assert (live.bytes, live.peak) == (400, 400)
        two = one.view(10, 10)
        assert live.bytes == 400
        del one
        assert live.bytes == 400
        del two
        weight.data.add_(0)
        assert (live.bytes, live.peak) == (0, 400)


def test_the_ends_of_a_stage_are_counted_with_the_wire():
    """What an entry and an exit keep is there for every microbatch in flight."""
    plain, learned = Limited(tiny()), Limited(tiny("autoencoder"))
    wire = wire_of(learned.stage, learned.codec, learned.config).flight_bytes
    assert learned.profile.payload_bytes > wire
    assert plain.profile.payload_bytes >= wire_of(plain.stage, plain.codec, plain.config).flight_bytes


def test_a_tied_head_is_no_activation():
    config = tiny(tied_head=True)
    pipeline = build_pipeline(config, torch.device("cpu"))
    last = make_profile(pipeline.stages[-1], pipeline.codec, config, FAST)
    untied = Limited(tiny()).profile
    assert last.blocks[-1].saved_bytes == untied.blocks[-1].saved_bytes
