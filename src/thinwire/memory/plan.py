"""Decide what each block of a stage does with its activations, so that the stage fits its budget and loses as little time as it can.

`simulate.py` is the cost, `search.py` looks for the choices. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thinwire.memory.blocks import Choice, Choices, Plan, Profile, alike, base_bytes, floor_bytes
from thinwire.memory.search import Search, rank
from thinwire.memory.simulate import copy_seconds, simulate
from thinwire.util.sizes import write_size

STRATEGIES = ("keep all", "offload all", "recompute all", "capacity only", "hybrid")


def make_plan(profile: Profile, budget: int, depth: int = 1) -> Plan:
    """Return the fastest plan that fits the budget; `depth` is how many microbatches the pipeline would keep in flight."""
    plan = best_plan(profile, budget, depth)
    if plan is None:
        raise ValueError(refusal(profile, budget))
    return plan


def refusal(profile: Profile, budget: int) -> str:
    """Say why no plan fits, and what would."""
    least = write_size(minimum(profile), up=True)
    largest = max(profile.blocks, key=lambda block: block.all_bytes)
    parts = ", ".join(f"{kind} {write_size(size)}" for kind, size in profile.kinds.items())
    movable = f", of which {write_size(profile.optimizer_bytes)} can lie in slow memory" if profile.optimizer_bytes else ""
    between = profile.slim.between(1) if movable and profile.bandwidth.usable else profile.between(1)
    smaller = ", the batch into more microbatches" if between < minimum(profile) else ""
    return (
        f"the memory budget is {write_size(budget)}, this stage needs at least {least}: {write_size(profile.fixed_bytes)} are always there"
        f"{f' ({parts})' if parts else ''}{movable}, its largest block, {largest.name}, works on {write_size(largest.all_bytes)}, "
        f"and an update or a checkpoint between steps needs {write_size(between)}; "
        f"set --memory.budget {least.replace(' ', '')} or more, or cut the model into more stages{smaller}"
    )


def best_plan(profile: Profile, budget: int, depth: int) -> Plan | None:
    """Return the fastest plan, with optimizer state in slow memory only if none fits otherwise; None if none fits at all."""
    plan = fastest(profile, budget, depth)
    if plan is not None or not profile.optimizer_bytes or not profile.bandwidth.usable:
        return plan
    plan = fastest(profile.slim, budget, depth)
    rates = profile.bandwidth.out_bytes_per_second, profile.bandwidth.in_bytes_per_second
    return plan and replace(
        plan, optimizer_out=True, seconds=plan.seconds + sum(copy_seconds(profile.optimizer_bytes, rate) for rate in rates)
    )


def fastest(profile: Profile, budget: int, depth: int) -> Plan | None:
    """Return the fastest plan, or None if none fits."""
    deepest = max(1, min(depth, profile.microbatches))
    best: Plan | None = None
    for in_flight in range(deepest, 0, -1):
        if best is not None and bubble_seconds(profile, in_flight, depth) >= best.seconds:
            break  # fewer in flight cost more still
        named = [choices for name in STRATEGIES[:-1] if (choices := choices_of(name, profile, in_flight, budget))]
        for choices in {*named, *Search(profile, in_flight, budget).best()}:
            best = faster(best, predict(profile, choices, in_flight, budget, depth))
    return best


def faster(first: Plan | None, second: Plan | None) -> Plan | None:
    """Return the faster plan; of two equally fast ones the simpler."""
    plans = [plan for plan in (first, second) if plan]
    return min(plans, key=lambda plan: rank(plan.seconds, plan.choices), default=None)


def compare_strategies(profile: Profile, budget: int, depth: int = 1) -> dict[str, Plan | None]:
    """Return the plan of each strategy by its name, None for one that does not fit the budget."""
    found: dict[str, Plan | None] = {}
    for name in STRATEGIES[:-1]:
        found[name] = None
        for in_flight in range(max(1, min(depth, profile.microbatches)), 0, -1):
            choices = choices_of(name, profile, in_flight, budget)
            if choices:
                found[name] = faster(found[name], predict(profile, choices, in_flight, budget, depth))
    return found | {"hybrid": best_plan(profile, budget, depth)}


def shapes(strategy: str, blocks: int) -> list[Choices]:
    """Return the choices that a strategy may make, the best first."""
    if strategy == "capacity only":
        return [alike("offload", blocks - kept) + alike("keep", kept) for kept in range(blocks, -1, -1)]
    words: dict[str, Choice] = {"keep all": "keep", "offload all": "offload", "recompute all": "recompute"}
    return [alike(words[strategy], blocks)]


def choices_of(strategy: str, profile: Profile, in_flight: int, budget: int) -> Choices | None:
    """Return the choices of a strategy, or None if it does not fit."""
    room = budget - base_bytes(profile, in_flight)
    possible = shapes(strategy, len(profile.blocks))
    return next((choices for choices in possible if floor_bytes(profile.blocks, choices, in_flight) <= room), None)


def strategy_minimum(profile: Profile, strategy: str) -> int:
    """Return the smallest budget with which a strategy gets through, one microbatch at a time."""
    return max(profile.between(1), base_bytes(profile, 1) + floor_bytes(profile.blocks, shapes(strategy, len(profile.blocks))[-1]))


def predict(profile: Profile, choices: Sequence[Choice], in_flight: int, budget: int, depth: int = 1) -> Plan | None:
    """Return what choices cost in a whole step, or None if they do not fit."""
    line = simulate(profile, choices, in_flight, budget)
    between = profile.between(in_flight)
    if line is None or between > budget:
        return None
    seconds = max(line.seconds, bubble_seconds(profile, in_flight, depth))
    return Plan(tuple(choices), in_flight, line.peak_bytes, seconds, ideal_seconds(profile), between_bytes=between)


def ideal_seconds(profile: Profile) -> float:
    """Return the time of a step's computation if memory were no limit."""
    return profile.microbatches * sum(block.forward_seconds + block.backward_seconds for block in profile.blocks)


def bubble_seconds(profile: Profile, in_flight: int, depth: int) -> float:
    """Return the least time of a step with so many microbatches in flight.

    The pipeline wants `depth` of them because a gradient comes back as late as `depth` microbatches take here; with fewer, the stage
    waits for it.
    """
    return ideal_seconds(profile) * max(1.0, min(depth, profile.microbatches) / in_flight)


def minimum(profile: Profile) -> int:
    """Return the smallest budget that any plan meets."""
    offload = profile.bandwidth.usable
    # With offload nothing but the block at work need be there; every plan needs that.
    choices = alike("offload" if offload else "recompute", len(profile.blocks))
    least = base_bytes(profile, 1) + floor_bytes(profile.blocks, choices)
    whole = max(least, profile.between(1))
    slim = max(least - profile.optimizer_bytes, profile.slim.between(1))
    return min(whole, slim) if offload and profile.optimizer_bytes else whole
