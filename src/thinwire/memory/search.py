"""Find the fastest choices for a budget and a number of microbatches in flight: all of them for few blocks, local search for many.

Deterministic: the same profile gives the same choices everywhere. What is found is ranked by a short step; `plan.py` decides by a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from thinwire.memory.blocks import CHOICES, BlockCost, Choice, Choices, Profile, alike, base_bytes, floor_bytes
from thinwire.memory.simulate import Machine, block_order, copy_seconds

EXHAUSTIVE = 10
"""Most blocks for which all 3^n plans are looked at."""
FINALISTS = 8
"""Best plans of the short step that are tried on a whole one."""
STARTS = 3
"""Plans of the usual shape from which local search sets out."""
FAR = 1.5
"""A plan that takes this many times as long as the best is not looked at further."""


class Search:
    """The plans of one profile, budget and number of microbatches in flight, with the time of a short step for each tried."""

    def __init__(self, profile: Profile, in_flight: int, budget: int) -> None:
        self.profile, self.in_flight = profile, in_flight
        self.room = budget - base_bytes(profile, in_flight)
        # Filled, two in steady state, emptied: what a longer step repeats. One at a time leaves nothing behind: all are alike.
        self.microbatches = 1 if in_flight == 1 else min(profile.microbatches, in_flight + 2)
        self.order = block_order(len(profile.blocks), in_flight, self.microbatches)
        self.tried: dict[Choices, float] = {}

    def seconds(self, choices: Choices, limit: float = math.inf) -> float:
        """Return the time of a short step, infinite if the plan does not fit or takes as long as the limit."""
        if choices not in self.tried:
            self.tried[choices] = self._simulate(choices, limit) if self.bound(choices) < limit else math.inf
        return self.tried[choices]

    def _simulate(self, choices: Choices, limit: float) -> float:
        blocks = self.profile.blocks
        if floor_bytes(blocks, choices, self.in_flight) > self.room:
            return math.inf
        machine = Machine(blocks, self.profile.bandwidth, choices, self.room)
        slack = limit - self.microbatches * compute_seconds(blocks, choices)
        return machine.clock if machine.run(self.order, slack) else math.inf

    def best(self) -> list[Choices]:
        """Return the best plans, the fastest first; of equally fast ones those that move least and are nearest to the usual shape."""
        found = self.climb()
        if len(self.profile.blocks) <= EXHAUSTIVE and found < math.inf:
            self.exhaust(found)
        fit = [choices for choices, seconds in self.tried.items() if seconds < math.inf]
        return sorted(fit, key=lambda choices: rank(self.tried[choices], choices))[:FINALISTS]

    def climb(self) -> float:
        """Change one or two blocks at a time from the best of the ordinary shapes; return the best time."""
        best = math.inf
        for shape in ordinary(len(self.profile.blocks)):
            best = min(best, self.seconds(shape, FAR * best))
        for start in sorted(self.tried, key=lambda choices: rank(self.tried[choices], choices))[:STARTS]:
            current = start
            while better := next((other for other in nearby(current) if self.better(other, current)), None):
                current = better
            best = min(best, self.seconds(current))
        return best

    def better(self, choices: Choices, than: Choices) -> bool:
        """Say whether choices are faster than others."""
        return self.seconds(choices, self.seconds(than)) < self.seconds(than)

    def exhaust(self, best: float) -> None:
        """Try every plan whose lower bound is below the best time known."""
        for bound, choices in sorted(self.bounded(best)):
            if bound >= best:
                return
            best = min(best, self.seconds(choices, best))

    def bounded(self, limit: float) -> Iterator[tuple[float, Choices]]:
        """List the plans that fit, with a time that none can beat, where that is below the limit."""
        blocks = self.profile.blocks
        stack: list[tuple[Choices, int, float]] = [((), 0, compute_seconds(blocks, alike("keep", len(blocks))))]
        while stack:
            choices, resting, engine = stack.pop()
            if len(choices) == len(blocks):
                if (bound := self.bound(choices)) < limit:
                    yield bound, choices
                continue
            block = blocks[len(choices)]
            again = engine + block.forward_seconds
            if self.in_flight * resting + block.all_bytes > self.room:
                continue
            stack.append(((*choices, "keep"), resting + block.all_bytes, engine))
            stack.append(((*choices, "offload"), resting, engine))
            if self.microbatches * again < limit:
                stack.append(((*choices, "recompute"), resting + block.input_bytes, again))

    def bound(self, choices: Choices) -> float:
        """Return a time of the short step that the plan cannot beat."""
        blocks, bandwidth = self.profile.blocks, self.profile.bandwidth
        engine = compute_seconds(blocks, choices)
        if "offload" not in choices:
            return self.microbatches * engine
        moved = sum(block.all_bytes for block, choice in zip(blocks, choices, strict=True) if choice == "offload")
        out, back = copy_seconds(moved, bandwidth.out_bytes_per_second), copy_seconds(moved, bandwidth.in_bytes_per_second)
        forward = sum(block.forward_seconds for block in blocks)
        # All copies in lie inside the backward, and the blocks up to the first offloaded one follow the last copy.
        first = choices.index("offload") + 1
        tail = compute_seconds(blocks[:first], choices[:first]) - sum(block.forward_seconds for block in blocks[:first])
        one = self.turn_seconds(choices, moved) + max(engine - forward, back + tail)
        return self.microbatches * (one if bandwidth.duplex else max(one, out + back))

    def turn_seconds(self, choices: Choices, moved: int) -> float:
        """Return the least time from the start of a microbatch's forward to its end."""
        blocks, last = self.profile.blocks, self.profile.blocks[-1]
        forward = sum(block.forward_seconds for block in blocks)
        if self.in_flight > 1:
            return forward
        # Before the last forward starts, what does not fit beside it has been copied out.
        resting = sum(block.resting_bytes(choice) for block, choice in zip(blocks[:-1], choices, strict=False))
        still = moved - (last.all_bytes if choices[-1] == "offload" else 0)
        excess = resting + still + last.all_bytes - self.room
        if excess <= 0:
            return forward
        head = sum(block.forward_seconds for block in blocks[: choices.index("offload") + 1])
        return max(forward, head + copy_seconds(excess, self.profile.bandwidth.out_bytes_per_second) + last.forward_seconds)


def compute_seconds(blocks: Sequence[BlockCost], choices: Sequence[Choice]) -> float:
    """Return the time of a microbatch's computation."""
    again = sum(block.forward_seconds for block, choice in zip(blocks, choices, strict=True) if choice == "recompute")
    return again + sum(block.forward_seconds + block.backward_seconds for block in blocks)


def rank(seconds: float, choices: Choices) -> tuple[float, int, int, Choices]:
    """Return by what plans are sorted: time, then what is moved, then how far they are from the usual shape."""
    places = [("offload", "recompute", "keep").index(choice) for choice in choices]
    disorder = sum(before > place for index, place in enumerate(places) for before in places[:index])
    return float(f"{seconds:.9g}"), places.count(0), disorder, choices


def ordinary(blocks: int) -> Iterator[Choices]:
    """List the plans of the usual shape: early blocks offloaded, middle ones recomputed, late ones kept."""
    for kept in range(blocks + 1):
        for recomputed in range(blocks - kept + 1):
            yield alike("offload", blocks - kept - recomputed) + alike("recompute", recomputed) + alike("keep", kept)


def nearby(choices: Choices) -> Iterator[Choices]:
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
