"""Find the fastest choices for a budget and a number of microbatches in flight: all of them for few blocks, local search for many.

Deterministic: the same profile gives the same choices everywhere. What is found is ranked by a short step; `plan.py` decides by a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from thinwire.memory.blocks import CHOICES, Choice, Profile
from thinwire.memory.simulate import Machine, compute_order, duration
from thinwire.memory.space import base_bytes, floor_bytes

EXHAUSTIVE = 10
"""Most blocks for which all 3^n plans are looked at."""
FINALISTS = 8
"""Best plans of the short step that are tried on a whole one."""
Choices = tuple[Choice, ...]


class Search:
    """The plans of one profile, budget and number of microbatches in flight, with the time of a short step for each tried."""

    def __init__(self, profile: Profile, in_flight: int, budget: int) -> None:
        self.profile, self.in_flight = profile, in_flight
        self.room = budget - base_bytes(profile, in_flight)
        # Filled, one in steady state, emptied: what a longer step repeats.
        self.microbatches = min(profile.microbatches, in_flight + 1)
        self.order = compute_order(len(profile.blocks), in_flight, self.microbatches)
        self.tried: dict[Choices, float] = {}

    def seconds(self, choices: Choices, slack: float = math.inf) -> float:
        """Return the time of a short step, infinite if the plan does not fit or computation waits longer than `slack`."""
        if choices not in self.tried:
            machine = Machine(self.profile.blocks, self.profile.tier, choices, self.room)
            fits = floor_bytes(self.profile.blocks, choices, self.in_flight) <= self.room
            self.tried[choices] = machine.clock if fits and machine.run(self.order, slack) else math.inf
        return self.tried[choices]

    def best(self) -> list[Choices]:
        """Return the best plans, the fastest first; of equally fast ones those that move least and are nearest to the usual shape."""
        found = self.climb()
        if len(self.profile.blocks) <= EXHAUSTIVE and found < math.inf:
            self.exhaust(found)
        fit = [choices for choices, seconds in self.tried.items() if seconds < math.inf]
        return sorted(fit, key=lambda choices: rank(self.tried[choices], choices))[:FINALISTS]

    def climb(self) -> float:
        """Change one or two blocks at a time from the best of the ordinary shapes; return the best time."""
        shapes = sorted(ordinary(len(self.profile.blocks)), key=self.seconds)
        best = math.inf
        for start in shapes[:3]:
            current = start
            while better := next((other for other in neighbours(current) if self.seconds(other) < self.seconds(current)), None):
                current = better
            best = min(best, self.seconds(current))
        return best

    def exhaust(self, best: float) -> None:
        """Try every plan whose lower bound is below the best time known."""
        for bound, choices, engine in sorted(self.bounded(best)):
            if bound >= best:
                return
            best = min(best, self.seconds(choices, best - engine))

    def bounded(self, limit: float) -> Iterator[tuple[float, Choices, float]]:
        """List the plans that fit, with a time that none can beat, where that is below the limit, and their computation's time."""
        blocks, times = self.profile.blocks, self.microbatches
        compute = sum(block.forward_seconds + block.backward_seconds for block in blocks)
        stack: list[tuple[Choices, int, float]] = [((), 0, compute)]
        while stack:
            choices, resting, engine = stack.pop()
            if times * engine >= limit:
                continue
            if len(choices) == len(blocks):
                if (bound := self.bound(choices, engine)) < limit:
                    yield bound, choices, times * engine
                continue
            block = blocks[len(choices)]
            if self.in_flight * resting + block.all_bytes <= self.room:
                stack.append(((*choices, "keep"), resting + block.all_bytes, engine))
                stack.append(((*choices, "recompute"), resting + block.input_bytes, engine + block.forward_seconds))
                stack.append(((*choices, "offload"), resting, engine))

    def bound(self, choices: Choices, engine: float) -> float:
        """Return a time that the plan cannot beat; its computation takes `engine` seconds a microbatch."""
        if "offload" not in choices:
            return self.microbatches * engine
        blocks, tier = self.profile.blocks, self.profile.tier
        moved = sum(block.all_bytes for block, choice in zip(blocks, choices, strict=True) if choice == "offload")
        out, back = duration(moved, tier.out_bytes_per_second), duration(moved, tier.in_bytes_per_second)
        first = choices.index("offload")
        forward = sum(block.forward_seconds for block in blocks)
        # All copies in lie inside the backward, and the blocks up to the first offloaded one follow the last copy.
        tail = sum(
            block.backward_seconds + (block.forward_seconds if choice == "recompute" else 0.0)
            for block, choice in zip(blocks[: first + 1], choices, strict=False)
        )
        turn = forward
        if self.in_flight == 1:  # before the last forward starts, what does not fit beside it has been copied out
            resting = sum(block.resting_bytes(choice) for block, choice in zip(blocks[:-1], choices, strict=False))
            held = moved - (blocks[-1].all_bytes if choices[-1] == "offload" else 0)
            head = sum(block.forward_seconds for block in blocks[: first + 1])
            excess = max(0, resting + held + blocks[-1].all_bytes - self.room)
            turn = max(forward, head + duration(excess, tier.out_bytes_per_second) + blocks[-1].forward_seconds)
        one = turn + max(engine - forward, back + tail)
        return self.microbatches * (one if tier.duplex else max(one, out + back))


def rank(seconds: float, choices: Choices) -> tuple[float, int, int, Choices]:
    """Return by what plans are sorted: time, then what is moved, then how far they are from the usual shape."""
    places = [("offload", "recompute", "keep").index(choice) for choice in choices]
    disorder = sum(before > place for index, place in enumerate(places) for before in places[:index])
    return float(f"{seconds:.9g}"), places.count(0), disorder, choices


def ordinary(blocks: int) -> Iterator[Choices]:
    """List the plans of the usual shape: early blocks offloaded, middle ones recomputed, late ones kept."""
    for kept in range(blocks + 1):
        for recomputed in range(blocks - kept + 1):
            yield ("offload",) * (blocks - kept - recomputed) + ("recompute",) * recomputed + ("keep",) * kept


def neighbours(choices: Choices) -> Iterator[Choices]:
    """List the plans that differ in one block, then those in which two blocks have changed places."""
    for index, before in enumerate(choices):
        for choice in CHOICES:
            if choice != before:
                yield changed(choices, {index: choice})
    for first in range(len(choices)):
        for second in range(first + 1, len(choices)):
            if choices[first] != choices[second]:
                yield changed(choices, {first: choices[second], second: choices[first]})


def changed(choices: Sequence[Choice], changes: dict[int, Choice]) -> Choices:
    """Return choices with some replaced."""
    return tuple(changes.get(index, choice) for index, choice in enumerate(choices))
