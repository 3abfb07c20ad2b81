"""Simulate a step of one stage under a plan: one compute engine, one copy engine, a limit on memory. The cost of `plan.py`.

The rules, which the executor follows too, are written down in docs/memory.md. Times are seconds, sizes bytes; the clock jumps from one
end of a piece of work to the next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.memory.blocks import Bandwidth, BlockCost, Choice, Profile, base_bytes, reserve
from thinwire.pipeline.order import compute_order

Kind = Literal["forward", "backward", "recompute", "out", "in"]


@dataclass(frozen=True)
class Event:
    """A piece of work on the compute engine or the copy engine."""

    kind: Kind
    block: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What happens in a step."""

    seconds: float
    peak_bytes: int
    """With everything that is always there."""
    events: tuple[Event, ...]
    memory: tuple[tuple[float, int], ...]
    """Moments at which the bytes in memory change, and the bytes from then on."""


def simulate(profile: Profile, choices: Sequence[Choice], in_flight: int, budget: int, microbatches: int | None = None) -> Timeline | None:
    """Run a step and record it; return None if the plan cannot get through with this budget."""
    base = base_bytes(profile, in_flight)
    machine = Machine(profile.blocks, profile.bandwidth, choices, budget - base, record=True)
    if not machine.run(block_order(len(profile.blocks), in_flight, microbatches or profile.microbatches)):
        return None
    memory = tuple((moment, base + used) for moment, used in machine.memory)
    return Timeline(machine.clock, base + machine.peak, tuple(machine.events), memory)


def block_order(blocks: int, in_flight: int, microbatches: int) -> list[tuple[bool, int, int]]:
    """List the work of the compute engine as (is forward, microbatch, block)."""
    ways = {"F": range(blocks), "B": range(blocks - 1, -1, -1)}
    turns = compute_order(min(in_flight, microbatches), microbatches)
    return [(turn == "F", microbatch, block) for turn, microbatch in turns for block in ways[turn]]


class Machine:
    """The two engines and the memory between them."""

    def __init__(
        self, blocks: Sequence[BlockCost], bandwidth: Bandwidth, choices: Sequence[Choice], room: int, record: bool = False
    ) -> None:
        self.blocks, self.choices, self.room, self.record = blocks, choices, room, record
        self.sizes = [block.all_bytes for block in blocks]
        self.out_seconds = [copy_seconds(size, bandwidth.out_bytes_per_second) for size in self.sizes]
        self.in_seconds = [copy_seconds(size, bandwidth.in_bytes_per_second) for size in self.sizes]
        self.duplex = bandwidth.duplex
        self.offloaded = [index for index, choice in enumerate(choices) if choice == "offload"]
        self.clock = 0.0
        self.used = self.peak = 0
        self.computing = self.leaving = self.coming = math.inf
        """When the work under way ends."""
        self.waiting_out: deque[tuple[int, int]] = deque()
        """(microbatch, block) still to be copied out, oldest first."""
        self.out_now = self.in_now = (0, 0)
        self.away: set[tuple[int, int]] = set()
        """Blocks whose copy out has ended."""
        self.back: set[tuple[int, int]] = set()
        """Blocks whose copy in has ended."""
        self.wanted: list[int] = []
        """Blocks to prefetch for the backward under way, the next one last."""
        self.recomputing = False
        self.events: list[Event] = []
        self.memory: list[tuple[float, int]] = []

    def run(self, order: list[tuple[bool, int, int]], slack: float = math.inf) -> bool:
        """Go through all work; return whether it could be done while the compute engine waited no longer than `slack`."""
        self.order, self.position = order, 0
        while self.position < len(order):
            self.start_compute()
            self.start_copies()
            end = min(self.computing, self.leaving, self.coming)
            if self.computing == math.inf:
                slack -= end - self.clock
            if end == math.inf or slack < 0:  # nothing is under way any more, or it takes too long
                return False
            self.clock = end
            self.finish()
        return True

    def take(self, size: int) -> None:
        """Occupy memory, or free it."""
        self.used += size
        self.peak = max(self.peak, self.used)
        if self.record:
            self.memory.append((self.clock, self.used))

    def note(self, kind: Kind, block: int, microbatch: int, seconds: float) -> float:
        """Record work that starts now; return its end."""
        end = self.clock + seconds
        if self.record:
            self.events.append(Event(kind, block, microbatch, self.clock, end))
        return end

    def start_compute(self) -> None:
        """Start the next piece of work if the engine is free and its space and bytes are there."""
        if self.computing != math.inf:
            return
        forward, microbatch, index = self.order[self.position]
        block, choice = self.blocks[index], self.choices[index]
        if forward:
            if self.used + self.sizes[index] <= self.room:
                self.take(self.sizes[index])
                self.computing = self.note("forward", index, microbatch, block.forward_seconds)
            return
        if choice == "recompute":
            if self.used + block.saved_bytes <= self.room:
                self.take(block.saved_bytes)
                self.recomputing = True
                self.computing = self.note("recompute", index, microbatch, block.forward_seconds)
        elif choice == "keep" or (microbatch, index) in self.back:
            self.computing = self.note("backward", index, microbatch, block.backward_seconds)

    def start_copies(self) -> None:
        """Start the copies that can start; without duplex a copy in goes before a copy out."""
        if self.coming == math.inf and self.wanted and (self.duplex or self.leaving == math.inf):
            self.start_in()
        if self.leaving == math.inf and self.waiting_out and (self.duplex or self.coming == math.inf):
            self.start_out()

    def start_in(self) -> None:
        """Prefetch the next block of the backward under way if it is out and there is space."""
        _, microbatch, working = self.order[self.position]
        index = self.wanted[-1]
        if (microbatch, index) not in self.away:
            return
        size = self.sizes[index]
        if self.used + size + reserve(self.blocks, self.choices, working, self.computing != math.inf, index) <= self.room:
            self.wanted.pop()
            self.take(size)
            self.in_now = (microbatch, index)
            self.coming = self.note("in", index, microbatch, self.in_seconds[index])

    def start_out(self) -> None:
        """Copy out the block that a prefetch waits for, else the oldest."""
        urgent = [key for key in self.waiting_out if self.wanted and key == (self.order[self.position][1], self.wanted[-1])]
        self.out_now = urgent[0] if urgent else self.waiting_out[0]
        self.waiting_out.remove(self.out_now)
        microbatch, index = self.out_now
        self.leaving = self.note("out", index, microbatch, self.out_seconds[index])

    def finish(self) -> None:
        """End all work that ends now."""
        if self.leaving == self.clock:
            self.leaving = math.inf
            self.away.add(self.out_now)
            self.take(-self.sizes[self.out_now[1]])
        if self.coming == self.clock:
            self.coming = math.inf
            self.back.add(self.in_now)
        if self.computing == self.clock:
            self.computing = math.inf
            self.finish_compute()

    def finish_compute(self) -> None:
        """End a forward, a recompute or a backward."""
        forward, microbatch, index = self.order[self.position]
        block, choice = self.blocks[index], self.choices[index]
        if self.recomputing:  # its backward follows at once
            self.recomputing = False
            self.computing = self.note("backward", index, microbatch, block.backward_seconds)
            return
        self.position += 1
        if not forward:
            self.take(-self.sizes[index])
        elif choice == "offload":
            self.waiting_out.append((microbatch, index))
        elif choice == "recompute":
            self.take(-block.saved_bytes)
        following = self.order[self.position] if self.position < len(self.order) else (True, 0, 0)
        if not following[0] and following[2] == len(self.blocks) - 1:  # a backward begins
            self.wanted = list(self.offloaded)


def copy_seconds(size: int, rate: float) -> float:
    """Return how long a copy takes."""
    return size / rate if rate > 0 else math.inf
