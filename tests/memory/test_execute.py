"""Plans are followed: the same gradients bit for bit, within the room, with exactly the recomputes and copies they say."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from memory.limited import EVERY_PLAN, PLANS, Limited, same, tiny
from thinwire.memory.blocks import Choice, floor_bytes
from thinwire.memory.measure import observe

CASES = {
    "dense": tiny(),
    "dense, dropout": tiny(dropout=0.2, output_dropout=0.1),
    "subspace": tiny("subspace"),
    "subspace, dropout": tiny("subspace", dropout=0.2),
    "subspace without a table": tiny("subspace", dropout=0.2, options={"fixed_cache_mb": 0.0}),
    "bf16": tiny(dtype="bf16"),
    "gains and biases": tiny(branch_norm_gains=True, output_bias=True),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_run(tmp_path, name):
    limited = Limited(CASES[name])
    plain = limited.gradients()
    for choices in PLANS.values():
        executor = limited.obey(choices, tmp_path)
        for _ in range(2):
            assert same(limited.gradients(), plain), choices
        assert executor.recomputed == 2 * choices.count("recompute")
        within(limited, executor, choices, 1)
        executor.close()
    assert list(tmp_path.iterdir()) == []


def within(limited: Limited, executor, choices, in_flight: int) -> None:
    """Check what was counted, and that nothing is left."""
    offload = executor.offload
    assert offload.counted_peak <= offload.peak <= floor_bytes(limited.profile.blocks, choices, in_flight)
    assert offload.counted == offload.used == 0
    offloaded = choices.count("offload")
    assert sum(map(len, offload._places)) == in_flight * offloaded  # every place in the slow memory is free again


@pytest.mark.parametrize(("order", "in_flight"), [("FFBFBB", 2), ("FFFBBB", 3), ("FBFBFB", 1)])
def test_several_microbatches_in_flight(tmp_path, order, in_flight):
    limited = Limited(tiny(dropout=0.1))
    plain = limited.gradients(order)
    for choices in PLANS.values():
        executor = limited.obey(choices, tmp_path, in_flight, microbatches=3)
        assert same(limited.gradients(order), plain), choices
        assert executor.recomputed == 3 * choices.count("recompute")
        within(limited, executor, choices, in_flight)
        executor.close()


@pytest.mark.full
@pytest.mark.parametrize("name", ["dense, dropout", "subspace"])
def test_every_plan(tmp_path, name):
    limited = Limited(CASES[name])
    plain = limited.gradients("FFBFBB")
    for choices in EVERY_PLAN:
        executor = limited.obey(choices, tmp_path, 2, microbatches=3)
        assert same(limited.gradients("FFBFBB"), plain), choices
        within(limited, executor, choices, 2)
        executor.close()


def test_all_keep_holds_the_sum_of_all_blocks(tmp_path):
    limited = Limited(tiny())
    executor = limited.obey(PLANS["all keep"], tmp_path)
    limited.gradients()
    assert executor.offload.peak == sum(block.all_bytes for block in limited.profile.blocks)
    found = observe(limited.stage, limited.codec, limited.config, 2).found
    assert executor.offload.counted_peak == sum(each.saved_bytes + each.input_bytes for each in found)  # a dense block keeps its input


def test_a_shared_storage_counts_once_and_parameters_do_not(tmp_path):
    limited = Limited(tiny())
    weights = sum(parameter.nbytes for parameter in limited.stage.layers["1"].parameters())
    tokens = 2 * limited.config.model.context
    # Head size 8 with 4 heads and 2 shared ones: the widths of what a block can keep, each at most a few times.
    widest = limited.config.model.ffn * 4 + limited.config.model.width * 16
    assert limited.profile.blocks[0].saved_bytes < tokens * widest * 4
    assert limited.profile.blocks[0].parameter_bytes == weights


def test_more_room_is_used_and_less_is_waited_for(tmp_path):
    """With room for everything nothing waits: the peak is what is kept at once, not the floor."""
    limited = Limited(tiny())
    choices: tuple[Choice, ...] = ("offload",) * 4
    executor = limited.obey(choices, tmp_path, room=10**9)
    plain = limited.gradients()
    executor.close()
    assert executor.offload.peak > floor_bytes(limited.profile.blocks, choices)
    assert same(limited.gradients(), plain)


def test_an_abandoned_step_leaves_nothing(tmp_path):
    limited = Limited(tiny(dropout=0.1))
    plain = limited.gradients("FFBB")
    executor = limited.obey(PLANS["mixed"], tmp_path, 2, microbatches=2)
    for order in ("F", "FF", "FFB"):
        executor.begin()
        limited.gradients(order)
    assert same(limited.gradients("FFBB"), plain)
    within(limited, executor, PLANS["mixed"], 2)


def test_closing_ends_the_thread_and_lets_the_memory_go(tmp_path):
    threads = threading.active_count()
    limited = Limited(tiny())
    executor = limited.obey(PLANS["all offload"], tmp_path)
    limited.gradients("F")
    storages = [storage for saved in executor._alive[0].saved for storage in saved.storages]
    assert threading.active_count() == threads + 1
    del storages
    executor.close()
    assert threading.active_count() == threads and limited.stage.runner is not executor
    gc.collect()
    assert not executor._alive


def test_a_plan_without_room_says_so_instead_of_waiting_for_ever(tmp_path):
    limited = Limited(tiny())
    floor = floor_bytes(limited.profile.blocks, PLANS["usual"])
    executor = limited.obey(PLANS["usual"], tmp_path, room=floor - 1)
    with pytest.raises(ValueError, match=r"no room for .*--memory.budget"):
        limited.gradients()
    executor.close()


def test_evaluation_runs_plainly(tmp_path):
    limited = Limited(tiny())
    with torch.no_grad():
        plain = limited.forward(0)
    executor = limited.obey(PLANS["all recompute"], tmp_path, room=0)
    with torch.no_grad():
        assert torch.equal(limited.forward(0), plain)
    assert executor.offload.peak == 0
