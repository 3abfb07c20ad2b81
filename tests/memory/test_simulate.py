"""The simulator: its rules, checked on time lines of random plans and on small ones computed by hand."""

from __future__ import annotations

import random
from itertools import pairwise

from memory.made import UNIT, arbitrary, equal
from thinwire.memory.blocks import CHOICES, Bandwidth, BlockCost, Profile, base_bytes, floor_bytes, reserve
from thinwire.memory.simulate import Event, Timeline, block_order, simulate
from thinwire.pipeline.order import compute_order

SEEDS = range(150)


def drawn(seed: int) -> tuple[Profile, tuple, int, int]:
    """Return a profile, choices, microbatches in flight, and a budget that is just enough or a little more."""
    draw = random.Random(1000 + seed)
    profile = arbitrary(seed)
    choices = tuple(draw.choice(CHOICES) for _ in profile.blocks)
    in_flight = draw.randrange(1, profile.microbatches + 1)
    least = base_bytes(profile, in_flight) + floor_bytes(profile.blocks, choices, in_flight)
    return profile, choices, in_flight, least + draw.choice((0, 0, 500, 3000))


def ran(seed: int) -> tuple[Profile, tuple, int, Timeline]:
    profile, choices, in_flight, budget = drawn(seed)
    line = simulate(profile, choices, in_flight, budget)
    assert line is not None and line.peak_bytes <= budget, seed
    return profile, choices, in_flight, line


def of(line: Timeline, *kinds: str) -> list[Event]:
    return [event for event in line.events if event.kind in kinds]


def test_the_order_of_computation_is_the_pipelines():
    for in_flight, microbatches in ((1, 1), (1, 3), (3, 3), (2, 5)):
        mine = [(forward, microbatch) for forward, microbatch, block in block_order(2, in_flight, microbatches) if block == 0]
        assert mine == [(kind == "F", index) for kind, index in compute_order(in_flight, microbatches)]


def test_each_engine_does_one_thing_at_a_time():
    for seed in SEEDS:
        profile, _, _, line = ran(seed)
        engines = [of(line, "forward", "recompute", "backward")]
        engines += [of(line, "out"), of(line, "in")] if profile.bandwidth.duplex else [of(line, "out", "in")]
        for events in engines:
            assert all(before.end <= after.start for before, after in pairwise(events))
        assert line.seconds == of(line, "backward")[-1].end


def test_every_block_does_what_it_was_told():
    for seed in SEEDS:
        profile, choices, _, line = ran(seed)
        done = {
            kind: {(event.microbatch, event.block): event for event in of(line, kind)}
            for kind in ("forward", "recompute", "backward", "out", "in")
        }
        everything = {(microbatch, block) for microbatch in range(profile.microbatches) for block in range(len(choices))}
        assert set(done["forward"]) == set(done["backward"]) == everything
        assert set(done["recompute"]) == {key for key in everything if choices[key[1]] == "recompute"}
        assert set(done["out"]) == set(done["in"]) == {key for key in everything if choices[key[1]] == "offload"}
        for key in done["out"]:
            moments = done["forward"][key].end, done["out"][key].start, done["out"][key].end, done["in"][key].start, done["in"][key].end
            assert list(moments) == sorted(moments) and moments[-1] <= done["backward"][key].start
        for key, event in done["recompute"].items():
            assert event.end == done["backward"][key].start
        assert sum(event.kind == "recompute" for event in line.events) == len(done["recompute"])


def test_memory_is_what_the_events_say():
    for seed in SEEDS:
        profile, choices, in_flight, line = ran(seed)
        changes: list[tuple[float, int]] = []
        for event in line.events:
            block, choice = profile.blocks[event.block], choices[event.block]
            if event.kind in ("forward", "in"):
                changes.append((event.start, block.all_bytes))
            if event.kind in ("backward", "out"):
                changes.append((event.end, -block.all_bytes))
            if event.kind == "recompute":
                changes.append((event.start, block.saved_bytes))
            if event.kind == "forward" and choice == "recompute":
                changes.append((event.end, -block.saved_bytes))
        used = base = base_bytes(profile, in_flight)
        peak = 0
        for _, size in sorted(changes, key=lambda change: (change[0], change[1])):
            used += size
            peak = max(peak, used)
        assert used == base and peak == line.peak_bytes == max(size for _, size in line.memory)


def test_prefetches_go_in_backward_order_inside_their_backward():
    for seed in SEEDS:
        *_, line = ran(seed)
        copies = of(line, "in")
        assert [(event.microbatch, -event.block) for event in copies] == sorted((event.microbatch, -event.block) for event in copies)
        forwards = of(line, "forward")
        for event in copies:
            end = max(other.end for other in of(line, "backward") if other.microbatch == event.microbatch)
            assert not any(event.start < other.start < end for other in forwards)


def test_a_plan_is_stuck_exactly_below_its_floor():
    for seed in SEEDS:
        profile, choices, in_flight, _ = drawn(seed)
        least = base_bytes(profile, in_flight) + floor_bytes(profile.blocks, choices, in_flight)
        assert simulate(profile, choices, in_flight, least) is not None
        assert simulate(profile, choices, in_flight, least - 1) is None


def test_prefetches_leave_a_recompute_its_slot():
    choices = ("offload", "offload", "offload", "recompute", "keep")
    line = simulate(equal(10.0, blocks=5), choices, 1, 2 * UNIT)
    assert line is not None and line.peak_bytes == 2 * UNIT
    blocks = equal(1.0, blocks=5).blocks
    assert reserve(blocks, choices, working=4, started=True, wanted=2) == 0  # what block 4 frees is enough for block 3
    assert reserve(blocks, choices, working=3, started=False, wanted=2) == UNIT
    assert reserve(blocks, choices, working=3, started=True, wanted=2) == 0


def test_two_blocks_by_hand():
    """F0 0-1, F1 1-2; out0 1-5 (one path for both ways); B1 2-4; in0 5-9; B0 9-11."""
    line = simulate(equal(0.25, blocks=2, duplex=False), ("offload", "keep"), 1, 2 * UNIT)
    assert [(event.kind, event.block, event.start, event.end) for event in sorted(line.events, key=lambda each: each.start)] == [
        ("forward", 0, 0, 1),
        ("forward", 1, 1, 2),
        ("out", 0, 1, 5),
        ("backward", 1, 2, 4),
        ("in", 0, 5, 9),
        ("backward", 0, 9, 11),
    ]
    assert line.memory == ((0, 1000), (1, 2000), (4, 1000), (5, 0), (5, 1000), (11, 0))


def test_forward_waits_for_space_and_a_copy_out_frees_it_at_its_end():
    line = simulate(equal(0.5, blocks=3), ("offload", "offload", "keep"), 1, 2 * UNIT)
    starts = {event.block: event.start for event in of(line, "forward")}
    assert starts == {0: 0, 1: 1, 2: 3}  # block 0 is out at 3


def test_keeping_all_holds_all_bytes_of_every_microbatch_in_flight():
    profile = equal(1.0, blocks=4, microbatches=5)
    for in_flight in (1, 2, 5):
        line = simulate(profile, ("keep",) * 4, in_flight, 10**9)
        assert line is not None and (line.peak_bytes, line.seconds) == (4 * UNIT * in_flight, 60.0)


def test_inputs_of_recomputed_blocks_stay():
    blocks = tuple(BlockCost(str(index), 1.0, 2.0, 100, 10) for index in range(4))
    line = simulate(Profile(blocks, Bandwidth(0, 0, False), 7, 3, 1), ("recompute",) * 4, 1, 10**9)
    assert line is not None and line.peak_bytes == 7 + 3 + 4 * 10 + 100


def test_without_slow_memory_offload_is_stuck():
    profile = Profile(equal(1.0).blocks, Bandwidth(0.0, 0.0, False), 0, 0, 1)
    assert simulate(profile, ("offload",) * 10, 1, 10**9) is None
