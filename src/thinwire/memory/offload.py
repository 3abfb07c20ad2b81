"""Keep a stage's activations within their room: make the computation wait for space, and carry parcels out and back on one thread.

The rules are those of `simulate.py`, in docs/memory.md: a block's forward starts when all it will keep fits; a copy out frees its bytes
when it has ended; backward prefetches in its order, leaving room for the recomputes on the way; a copy in goes before a copy out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from thinwire.memory.blocks import Block, Choice
from thinwire.memory.saved_tensors import Parcel
from thinwire.memory.space import reserve
from thinwire.memory.tier import SlowTier, aligned

STALL_SECONDS = 60.0
"""A disk that moves nothing for this long while the computation waits for it is given up."""


def slow_bytes(blocks: Sequence[Block], choices: Sequence[Choice], in_flight: int) -> int:
    """Return the size of the slow tier that a plan needs."""
    return in_flight * sum(aligned(block.all_bytes) for block, choice in zip(blocks, choices, strict=True) if choice == "offload")


class Courier:
    """The room for activations, who waits for it, and the copy thread."""

    def __init__(
        self,
        blocks: Sequence[Block],
        choices: Sequence[Choice],
        room: float,
        in_flight: int = 1,
        tier: SlowTier | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Serve a plan for these blocks within so many bytes; a plan that offloads needs a tier."""
        self.blocks, self.choices, self.room, self.in_flight = blocks, choices, room, in_flight
        self.tier, self.stall_seconds = tier, stall_seconds
        self.used = self.peak = 0
        """Bytes by the rules: what a block will keep counts from the start of its forward."""
        self.counted = self.counted_peak = 0
        """Bytes that autograd's hooks have really brought."""
        self.problem: ValueError | None = None
        """Why the copy thread has ended before its time."""
        self._changed = threading.Condition()
        self._leaving: deque[Parcel] = deque()
        self._wanted: list[Parcel] = []
        self._working, self._started = 0, False
        self._busy = self._closed = False
        self._errand: Callable[[], None] | None = None
        self._places = self._all_places()
        self._thread = threading.Thread(target=self._carry_on, name="thinwire-courier", daemon=True) if tier is not None else None
        if self._thread is not None:
            self._thread.start()

    def _all_places(self) -> list[list[int]]:
        """List the free places of each block in the tier: one for every microbatch in flight."""
        places: list[list[int]] = []
        end = 0
        for block, choice in zip(self.blocks, self.choices, strict=True):
            places.append([])
            for _ in range(self.in_flight if choice == "offload" else 0):
                places[-1].append(end)
                end += aligned(block.all_bytes)
        return places

    def start_forward(self, index: int) -> None:
        """Wait until all that a block will keep fits, and take the space."""
        size = self.blocks[index].all_bytes
        with self._changed:
            self._wait(lambda: self.used + size <= self.room, f"{size / 1e6:.1f} MB for the forward of {self.blocks[index].name}")
            self._take(size)

    def end_forward(self, parcel: Parcel) -> None:
        """Send a parcel out if the plan says so; of a block that will be recomputed only the input stays."""
        choice, block = self.choices[parcel.block], self.blocks[parcel.block]
        parcel.close()
        with self._changed:
            if choice == "recompute":
                self._take(-block.saved_bytes)
            elif choice == "offload":
                assert self.tier is not None and parcel.size <= aligned(block.all_bytes), "more activations than were measured"
                parcel.place = self._places[parcel.block].pop()
                parcel.mark = self.tier.mark()
                self._leaving.append(parcel)
                self._changed.notify_all()

    def want(self, parcels: Sequence[Parcel]) -> None:
        """Start to fetch a microbatch's parcels: its backward comes next."""
        with self._changed:
            self._wanted = [parcel for parcel in parcels if self.choices[parcel.block] == "offload"]
            self._working, self._started = len(parcels) - 1, False
            self._changed.notify_all()

    def start_backward(self, parcel: Parcel) -> None:
        """Wait until a block's activations are back, or until there is space to compute them again."""
        choice, block = self.choices[parcel.block], self.blocks[parcel.block]
        with self._changed:
            if choice == "recompute":
                size = block.saved_bytes
                self._wait(lambda: self.used + size <= self.room, f"{size / 1e6:.1f} MB to recompute {block.name}")
                self._take(size)
                parcel.count(size)
            elif choice == "offload":
                self._wait(lambda: parcel.state == "back", f"the activations of {block.name}")
            self._working, self._started = parcel.block, True

    def end_backward(self, parcel: Parcel) -> None:
        """Free what a block has kept."""
        with self._changed:
            self._take(-self.blocks[parcel.block].all_bytes)
            parcel.let_go()
            if parcel.place is not None:
                self._places[parcel.block].append(parcel.place)
            self._working, self._started = parcel.block - 1, False
            self._changed.notify_all()

    def errand(self, work: Callable[[], None], what: str) -> None:
        """Let the copy thread do something between its copies, and wait for it."""
        with self._changed:
            if self._closed:
                raise ValueError(f"the slow memory is closed, and {what} with it; go on from the last checkpoint")
            self._errand = work
            self._changed.notify_all()
            self._wait(lambda: self._errand is None, what)

    def clear(self) -> None:
        """Forget the parcels of a step that was given up."""
        with self._changed:
            self._leaving.clear()
            self._wanted = []
            self._wait(lambda: not self._busy, "the copy under way")
            self.used = self.counted = 0
            self._places = self._all_places()

    def close(self) -> None:
        """End the copy thread and give the slow memory back."""
        with self._changed:
            self._closed = True
            self._leaving.clear()
            self._wanted = []
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self.stall_seconds)
        if self.tier is not None and (self._thread is None or not self._thread.is_alive()):
            self.tier.close()  # otherwise a dead disk holds the thread, and its file must not be pulled away under it

    def count(self, size: int) -> None:
        """Enter bytes that hooks have seen."""
        with self._changed:
            self.counted += size
            self.counted_peak = max(self.counted_peak, self.counted)

    def _take(self, size: int) -> None:
        """Occupy space, or free it."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for the copy thread; raise what it met, or that it does not get on."""
        moved, deadline = -1, 0.0
        while not ready():
            if self.problem is None and not self._busy and self._errand is None and self._next() is None:
                self.problem = ValueError(
                    f"no room for {what}: {self.used / 1e6:.1f} of {self.room / 1e6:.1f} MB are in use and nothing is on its way out; "
                    "raise --memory.budget"
                )
            if self.problem is not None:
                raise self.problem
            assert self.tier is not None
            if self.tier.moved != moved:
                moved, deadline = self.tier.moved, time.monotonic() + self.stall_seconds
            elif time.monotonic() > deadline:
                self.problem = ValueError(
                    f"the slow memory has moved nothing for {self.stall_seconds:g} s while training waits for {what}; see whether the "
                    "disk of --memory.folder still answers, choose another, or raise --memory.budget so that less is offloaded"
                )
                raise self.problem
            self._changed.wait(min(1.0, self.stall_seconds / 4))

    def _next(self) -> tuple[bool, Parcel] | None:
        """Choose the next copy: (whether it goes out, which parcel); None if there is nothing to do or no room."""
        first = self._wanted[-1] if self._wanted else None
        if first is not None and first.state == "away":
            free = self.room - self.used - self.blocks[first.block].all_bytes
            if reserve(self.blocks, self.choices, self._working, self._started, first.block) <= free:
                return False, first
        if first is not None and first in self._leaving:
            return True, first
        return (True, self._leaving[0]) if self._leaving else None

    def _carry_on(self) -> None:
        """Carry parcels until the end: the work of the copy thread."""
        while (job := self._await_job()) is not None:
            try:
                job() if callable(job) else self._carry(*job)
            except Exception as error:  # whatever it was: whoever waits must hear of it
                with self._changed:
                    self._busy = False
                    self.problem = error if isinstance(error, ValueError) else ValueError(f"copying activations failed: {error!r}")
                    self._changed.notify_all()
                return
            with self._changed:
                if callable(job):
                    self._errand = None
                else:
                    self._finish(*job)
                self._changed.notify_all()

    def _await_job(self) -> Callable[[], None] | tuple[bool, Parcel] | None:
        """Wait for an errand or a copy to do; None at the end."""
        with self._changed:
            while not self._closed:
                if self._errand is not None:
                    return self._errand
                if (job := self._next()) is not None:
                    self._start(*job)
                    return job
                self._changed.wait()
            return None

    def _start(self, out: bool, parcel: Parcel) -> None:
        self._busy = True
        if out:
            self._leaving.remove(parcel)
        else:
            self._wanted.remove(parcel)
            self._take(self.blocks[parcel.block].all_bytes)
            parcel.count(parcel.size)

    def _carry(self, out: bool, parcel: Parcel) -> None:
        assert self.tier is not None and parcel.place is not None
        if out:
            self.tier.write(parcel.place, parcel.pieces, parcel.mark)
        else:
            pieces = [torch.empty(size, dtype=torch.uint8, device=parcel.device) for size in parcel.sizes]
            self.tier.read(parcel.place, pieces)
            parcel.pieces = pieces

    def _finish(self, out: bool, parcel: Parcel) -> None:
        self._busy = False
        if out:
            parcel.let_go()
            parcel.state = "away"
            self._take(-self.blocks[parcel.block].all_bytes)
        else:
            parcel.state = "back"
