"""Keep a stage within its room: make the computation wait for space, and copy saved tensors and optimizer state out and back on one thread.

The rules are those of `simulate.py`, in docs/memory.md: a block's forward starts when all it will keep fits; a copy out frees its bytes
when it has ended; backward prefetches in its order, leaving room for the recomputes on the way; a copy in goes before a copy out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from thinwire.memory.blocks import BlockCost, Choice, reserve
from thinwire.memory.saved_tensors import SavedTensors, flat_bytes
from thinwire.memory.slow_memory import ALIGNMENT, SlowMemory, aligned

STALL_SECONDS = 60.0
"""A disk that moves nothing for this long while the computation waits for it is given up."""


def slow_bytes(blocks: Sequence[BlockCost], choices: Sequence[Choice], in_flight: int) -> int:
    """Return the size of the slow memory that a plan needs."""
    return in_flight * sum(aligned(block.all_bytes) for block, choice in zip(blocks, choices, strict=True) if choice == "offload")


class OffloadThread:
    """The room for activations, who waits for it, and the copy thread."""

    def __init__(
        self,
        blocks: Sequence[BlockCost],
        choices: Sequence[Choice],
        room: float,
        in_flight: int = 1,
        slow: SlowMemory | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Serve a plan for these blocks within so many bytes; a plan that offloads needs slow memory."""
        self.blocks, self.choices, self.room, self.in_flight = blocks, choices, room, in_flight
        self.slow, self.stall_seconds = slow, stall_seconds
        self.used = self.peak = 0
        """Bytes by the rules: what a block will keep counts from the start of its forward."""
        self.counted = self.counted_peak = 0
        """Bytes that autograd's hooks have really brought."""
        self.problem: ValueError | None = None
        """Why the copy thread has ended before its time."""
        self._changed = threading.Condition()
        self._leaving: deque[SavedTensors] = deque()
        self._wanted: list[SavedTensors] = []
        self._working, self._started = 0, False
        self._busy = self._closed = False
        self._task: Callable[[], None] | None = None
        self._places = self._all_places()
        self._thread = threading.Thread(target=self._work, name="thinwire-offload", daemon=True) if slow is not None else None
        if self._thread is not None:
            self._thread.start()

    def _all_places(self) -> list[list[int]]:
        """List the free places of each block in slow memory: one for every microbatch in flight."""
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

    def end_forward(self, saved: SavedTensors) -> None:
        """Send a block's saved tensors out if the plan says so; of a block that will be recomputed only the input stays."""
        choice, block = self.choices[saved.block], self.blocks[saved.block]
        saved.close()
        with self._changed:
            if choice == "recompute":
                self._take(-block.saved_bytes)
            elif choice == "offload":
                assert self.slow is not None and saved.size <= aligned(block.all_bytes), "more activations than were measured"
                saved.place = self._places[saved.block].pop()
                saved.mark = self.slow.mark()
                self._leaving.append(saved)
                self._changed.notify_all()

    def want(self, microbatch: Sequence[SavedTensors]) -> None:
        """Start to fetch a microbatch's saved tensors: its backward comes next."""
        with self._changed:
            self._wanted = [saved for saved in microbatch if self.choices[saved.block] == "offload"]
            self._working, self._started = len(microbatch) - 1, False
            self._changed.notify_all()

    def start_backward(self, saved: SavedTensors) -> None:
        """Wait until a block's activations are back, or until there is space to compute them again."""
        choice, block = self.choices[saved.block], self.blocks[saved.block]
        with self._changed:
            if choice == "recompute":
                size = block.saved_bytes
                self._wait(lambda: self.used + size <= self.room, f"{size / 1e6:.1f} MB to recompute {block.name}")
                self._take(size)
                saved.count(size)
            elif choice == "offload":
                self._wait(lambda: saved.state == "back", f"the activations of {block.name}")
            self._working, self._started = saved.block, True

    def end_backward(self, saved: SavedTensors) -> None:
        """Free what a block has kept."""
        with self._changed:
            self._take(-self.blocks[saved.block].all_bytes)
            saved.free()
            if saved.place is not None:
                self._places[saved.block].append(saved.place)
            self._working, self._started = saved.block - 1, False
            self._changed.notify_all()

    def run(self, work: Callable[[], None], what: str) -> None:
        """Let the copy thread do something between its copies, and wait for it."""
        with self._changed:
            if self._closed:
                raise ValueError(f"the slow memory is closed, and {what} with it; go on from the last checkpoint")
            self._task = work
            self._changed.notify_all()
            self._wait(lambda: self._task is None, what)

    def clear(self) -> None:
        """Forget the saved tensors of a step that was given up."""
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
        if self.slow is not None and (self._thread is None or not self._thread.is_alive()):
            self.slow.close()  # otherwise a dead disk holds the thread, and its file must not be pulled away under it

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
            if self.problem is None and not self._busy and self._task is None and self._next() is None:
                self.problem = ValueError(
                    f"no room for {what}: {self.used / 1e6:.1f} of {self.room / 1e6:.1f} MB are in use and nothing is on its way out; "
                    "raise --memory.budget"
                )
            if self.problem is not None:
                raise self.problem
            assert self.slow is not None
            if self.slow.moved != moved:
                moved, deadline = self.slow.moved, time.monotonic() + self.stall_seconds
            elif time.monotonic() > deadline:
                self.problem = ValueError(
                    f"the slow memory has moved nothing for {self.stall_seconds:g} s while training waits for {what}; see whether the "
                    "disk of --memory.folder still answers, choose another, or raise --memory.budget so that less is offloaded"
                )
                raise self.problem
            self._changed.wait(min(1.0, self.stall_seconds / 4))

    def _next(self) -> tuple[bool, SavedTensors] | None:
        """Choose the next copy: (whether it goes out, of which block); None if there is nothing to do or no room."""
        first = self._wanted[-1] if self._wanted else None
        if first is not None and first.state == "away":
            free = self.room - self.used - self.blocks[first.block].all_bytes
            if reserve(self.blocks, self.choices, self._working, self._started, first.block) <= free:
                return False, first
        if first is not None and first in self._leaving:
            return True, first
        return (True, self._leaving[0]) if self._leaving else None

    def _work(self) -> None:
        """Copy until the end: the work of the thread."""
        while (job := self._await_job()) is not None:
            try:
                job() if callable(job) else self._copy(*job)
            except Exception as error:  # whatever it was: whoever waits must hear of it
                with self._changed:
                    self._busy = False
                    self.problem = error if isinstance(error, ValueError) else ValueError(f"copying activations failed: {error!r}")
                    self._changed.notify_all()
                return
            with self._changed:
                if callable(job):
                    self._task = None
                else:
                    self._finish(*job)
                self._changed.notify_all()

    def _await_job(self) -> Callable[[], None] | tuple[bool, SavedTensors] | None:
        """Wait for a task or a copy to do; None at the end."""
        with self._changed:
            while not self._closed:
                if self._task is not None:
                    return self._task
                if (job := self._next()) is not None:
                    self._start(*job)
                    return job
                self._changed.wait()
            return None

    def _start(self, out: bool, saved: SavedTensors) -> None:
        self._busy = True
        if out:
            self._leaving.remove(saved)
        else:
            self._wanted.remove(saved)
            self._take(self.blocks[saved.block].all_bytes)
            saved.count(saved.size)

    def _copy(self, out: bool, saved: SavedTensors) -> None:
        assert self.slow is not None and saved.place is not None
        if out:
            self.slow.write(saved.place, saved.storages, saved.mark)
        else:
            storages = [torch.empty(size, dtype=torch.uint8, device=saved.device) for size in saved.sizes]
            self.slow.read(saved.place, storages)
            saved.storages = storages

    def _finish(self, out: bool, saved: SavedTensors) -> None:
        self._busy = False
        if out:
            saved.free()
            saved.state = "away"
            self._take(-self.blocks[saved.block].all_bytes)
        else:
            saved.state = "back"


class OptimizerOffload:
    """Slow memory for optimizer state: a parameter's state is in memory while it is updated, and lies there from one update to the next.

    It is idle during forward and backward, when activations need the room. What lies where is found by name.
    """

    def __init__(self, thread: OffloadThread, start: int) -> None:
        """Use slow memory from a place on."""
        self.thread, self._end = thread, start
        self._places: dict[str, int] = {}
        self._away: dict[str, tuple[torch.Size, tuple[int, ...]]] = {}
        """Shape and strides of what is out."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor out and leave it empty. What is small is not worth the way."""
        size = tensor.untyped_storage().nbytes()
        if name in self._away or size < ALIGNMENT or size != tensor.nbytes:
            return
        if name not in self._places:
            self._places[name] = self._end
            self._end += aligned(size)
        slow, place = self.thread.slow, self._places[name]
        assert slow is not None and self._end <= slow.size, "more optimizer state than was measured"
        mark, piece = slow.mark(), flat_bytes(tensor)
        self.thread.run(lambda: slow.write(place, [piece], mark), f"room for {name}")
        self._away[name] = tensor.shape, tensor.stride()
        tensor.data = tensor.new_empty(0)

    def get(self, name: str, tensor: Tensor) -> None:
        """Give a tensor its memory again, if it is out."""
        if name not in self._away:
            return
        slow, place = self.thread.slow, self._places[name]
        assert slow is not None
        whole = tensor.new_empty_strided(*self._away[name])
        self.thread.run(lambda: slow.read(place, [flat_bytes(whole)]), name)
        tensor.data = whole
        del self._away[name]


def worth_moving(states: Iterable[Iterable[int]]) -> list[int]:
    """Return the sizes, of those of all parameters' state, that are worth the way."""
    return [size for sizes in states for size in sizes if size >= ALIGNMENT]
