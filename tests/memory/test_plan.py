"""The planner: the table of docs/memory.md, never worse than any strategy, never above the budget, the true optimum for few blocks."""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path

import pytest

from memory.made import UNIT, arbitrary, equal
from thinwire.memory.blocks import CHOICES, Bandwidth, BlockCost, Profile
from thinwire.memory.plan import STRATEGIES, bubble_seconds, compare_strategies, make_plan, minimum, predict
from thinwire.memory.search import Search
from thinwire.memory.simulate import simulate
from thinwire.util.sizes import read_size

TABLE = {
    1.0: (32.0, 40.0, 30.0, 30.0, "oooooo kkkk"),
    0.5: (39.0, 40.0, 34.0, 32.0, "oooo rr kkkk"),
    0.34: (55.9, 40.0, 41.3, 33.8, "ooo rrr kkkk"),
    0.25: (75.0, 40.0, 54.0, 34.0, "oo rrrr kkkk"),
}
"""Offload all, recompute all, capacity only, hybrid and its choices by bandwidth: ten equal blocks, memory for four, ideal 30."""


@pytest.mark.parametrize("bandwidth", TABLE)
def test_the_table(bandwidth):
    plans = compare_strategies(equal(bandwidth), 4 * UNIT)
    assert plans.pop("keep all") is None
    *times, choices = TABLE[bandwidth]
    assert [round(plan.seconds, 1) for plan in plans.values()] == times
    assert "".join(choice[0] for choice in plans["hybrid"].choices) == choices.replace(" ", "")
    assert all(plan.peak_bytes <= 4 * UNIT and plan.ideal_seconds == 30 for plan in plans.values())


def test_the_table_is_that_of_the_documents():
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text().partition("## The table")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d\.\d+) \| (.*) \|$", page, re.MULTILINE)
    assert {float(bandwidth): tuple(cells.split(" | ")) for bandwidth, cells in rows} == {
        bandwidth: (*map(str, times), choices) for bandwidth, (*times, choices) in TABLE.items()
    }


def test_order_and_limits_of_the_specification():
    specified = {
        1.0: (31.0, 40.0, 30.0, 30.0),
        0.5: (39.0, 40.0, 34.0, 32.0),
        0.34: (55.0, 40.0, 41.3, 33.8),
        0.25: (73.0, 40.0, 54.0, 34.0),
    }
    for bandwidth, wanted in specified.items():
        ours = TABLE[bandwidth][:4]
        assert sorted(range(4), key=ours.__getitem__) == sorted(range(4), key=wanted.__getitem__)
        assert all(math.isclose(mine, theirs, rel_tol=0.033) for mine, theirs in zip(ours, wanted, strict=True))
    assert TABLE[0.34][0] / TABLE[0.34][3] >= 1.5


def test_ample_bandwidth_reaches_the_ideal():
    for duplex in (True, False):
        plan = make_plan(equal(100.0, duplex=duplex), 4 * UNIT)
        assert plan.seconds == plan.ideal_seconds == 30


def test_no_strategy_beats_the_hybrid_on_random_profiles():
    for seed in range(200):
        profile = arbitrary(seed)
        budget = int(minimum(profile) * (1 + seed % 5 / 4))
        plans = compare_strategies(profile, budget, depth=1 + seed % 3)
        hybrid = plans["hybrid"]
        assert hybrid is not None and hybrid.peak_bytes <= budget
        assert all(hybrid.seconds <= plan.seconds for plan in plans.values() if plan), seed
        line = simulate(profile, hybrid.choices, hybrid.in_flight, budget)
        assert line is not None and line.seconds <= hybrid.seconds + 1e-9 and line.peak_bytes == hybrid.peak_bytes


def test_few_blocks_get_the_best_of_all_plans():
    for seed in range(25):
        profile = arbitrary(seed, most=5)
        budget, depth = int(minimum(profile) * 1.2), 2
        every = product(product(CHOICES, repeat=len(profile.blocks)), range(1, min(depth, profile.microbatches) + 1))
        times = [plan.seconds for choices, in_flight in every if (plan := predict(profile, choices, in_flight, budget, depth))]
        assert make_plan(profile, budget, depth).seconds <= min(times) * (1 + 1e-9), seed


def test_no_plan_beats_its_lower_bound():
    for seed in range(60):
        profile = arbitrary(seed, most=4)
        search = Search(profile, 1 + seed % min(2, profile.microbatches), int(minimum(profile) * 1.5))
        for choices in product(CHOICES, repeat=len(profile.blocks)):
            assert search.bound(choices) <= search.seconds(choices) * (1 + 1e-9), (seed, choices)


def test_many_blocks_are_searched_locally_and_always_the_same_way():
    profile = equal(0.34, blocks=14)
    plans = compare_strategies(profile, 5 * UNIT)
    assert all(plans["hybrid"].seconds <= plan.seconds for plan in plans.values() if plan)
    assert plans["hybrid"].seconds < 1.2 * plans["hybrid"].ideal_seconds
    assert make_plan(profile, 5 * UNIT) == plans["hybrid"]


def test_enough_memory_keeps_everything():
    for depth in (1, 3):
        plan = make_plan(equal(0.01, blocks=6, microbatches=4), 6 * UNIT * depth, depth)
        assert plan.choices == ("keep",) * 6 and plan.in_flight == depth and plan.seconds == plan.ideal_seconds


def test_fewer_microbatches_in_flight_cost_what_the_pipeline_waits():
    profile = equal(1e-6, blocks=4, microbatches=4)
    assert bubble_seconds(profile, 1, depth=2) == 2 * bubble_seconds(profile, 2, depth=2) == 96
    # Memory for one microbatch: to recompute costs less than a pipeline that waits.
    plan = make_plan(profile, 4 * UNIT, depth=2)
    assert plan.in_flight == 2 and plan.seconds < 96 and "recompute" in plan.choices
    # Two whole microbatches fit. A third needs the large block recomputed, which takes longer than the pipeline waits.
    blocks = (BlockCost("large", 10.0, 0.1, 3 * UNIT, 0), BlockCost("small", 0.1, 0.1, UNIT, 0))
    plan = make_plan(Profile(blocks, Bandwidth(1.0, 1.0, False), 0, 0, 6), 8 * UNIT, depth=3)
    assert (plan.in_flight, plan.choices) == (2, ("keep", "keep")) and plan.seconds == pytest.approx(1.5 * plan.ideal_seconds)


def test_the_minimum_is_met_and_a_byte_less_is_refused_with_it():
    for seed in range(40):
        profile = arbitrary(seed)
        least = minimum(profile)
        assert make_plan(profile, least, depth=2).peak_bytes == least
        with pytest.raises(ValueError, match="needs at least"):
            make_plan(profile, least - 1, depth=2)


def test_the_refusal_says_what_to_do():
    blocks = (BlockCost("layer 3", 1.0, 1.0, 299_000_000, 1_000_000),)
    profile = Profile(blocks, Bandwidth(1e9, 1e9, False), 123_456_789, 0, 4, kinds={"parameters": 100_000_000, "gradients": 23_456_789})
    with pytest.raises(ValueError) as refused:
        make_plan(profile, read_size("200MB"))
    message = str(refused.value)
    for part in (
        "budget is 200 MB",
        "at least 424 MB",
        "parameters 100 MB, gradients 23.5 MB",
        "layer 3",
        "300 MB",
        "--memory.budget",
        "microbatches",
    ):
        assert part in message
    (advised,) = re.findall(r"--memory.budget (\S+)", message)
    make_plan(profile, read_size(advised))


def test_without_slow_memory_the_minimum_keeps_all_inputs():
    blocks = tuple(BlockCost(str(index), 1.0, 2.0, 100, 10) for index in range(4))
    profile = Profile(blocks, Bandwidth(0.0, 0.0, False), 0, 0, 1)
    assert minimum(profile) == 140
    plan = make_plan(profile, 140)
    assert plan.choices.count("recompute") >= 3 and "offload" not in plan.choices


def test_strategies_that_do_not_fit_are_absent():
    plans = compare_strategies(equal(1.0, blocks=4), 2 * UNIT)
    assert list(plans) == list(STRATEGIES) and plans["keep all"] is None
    assert plans["capacity only"].choices == ("offload", "offload", "keep", "keep")
