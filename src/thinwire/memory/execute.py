"""Run the blocks of a stage as a plan says: keep what autograd saves, carry it to the slow tier and back, or compute it again.

The gradients are those of the plain run, bit for bit: what is carried comes back as it was, and what is computed again draws the same
numbers, because all dropout is a function of (seed, step, sample, layer). Put in place with `stage.runner = Executor(...)`.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from thinwire.memory.offload import Courier
from thinwire.memory.saved_tensors import Parcel, address
from thinwire.model.stage import PLAIN, Runner, Stage


class Microbatch:
    """The parcels of one microbatch, in the order of the blocks, and what the stage's ends keep of it."""

    def __init__(self, exempt: frozenset[int], count: Callable[[int], None]) -> None:
        self.exempt = exempt
        self.parcels: list[Parcel] = []
        self.ends = Parcel(-1, exempt, count)


class Executor(Runner):
    """Run one stage's blocks within the room that its courier keeps."""

    def __init__(self, stage: Stage, courier: Courier, microbatches: int = 1) -> None:
        """Follow the courier's plan in steps of so many microbatches, `courier.in_flight` of them alive at once."""
        self.stage, self.courier, self.microbatches = stage, courier, microbatches
        self.recomputed = 0
        """Blocks that were computed again, so far."""
        self._current: Microbatch | None = None
        if "recompute" in courier.choices:
            importlib.import_module("torch._dynamo")  # checkpointing does, at a length that belongs to no step
        self.begin()

    @property
    def problem(self) -> ValueError | None:  # type: ignore[override]
        return self.courier.problem

    def begin(self) -> None:
        """Begin a step: nothing of the one before is left, however it ended."""
        self.courier.clear()
        self._alive: deque[Microbatch] = deque()
        self._started = 0
        self._lasting = lasting(self.stage)

    def close(self) -> None:
        """Let the stage run plainly again, and end the courier."""
        self.stage.runner = PLAIN
        self._alive.clear()
        self.courier.close()

    @contextmanager
    def microbatch(self, received: Sequence[Tensor]) -> Iterator[None]:
        self._current = current = Microbatch(self._lasting | {address(tensor) for tensor in received}, self.courier.count)
        with current.ends.hooks():
            yield
        current.ends.close()
        self._current = None
        self._alive.append(current)
        self._started += 1
        if len(self._alive) == self.courier.in_flight or self._started == self.microbatches:
            self.courier.want(self._alive[0].parcels)

    def run(self, block: Callable[[Tensor], Tensor], stream: Tensor) -> Tensor:
        current, courier = self._current, self.courier
        assert current is not None
        parcel = Parcel(len(current.parcels), current.exempt, courier.count)
        courier.start_forward(parcel.block)
        current.parcels.append(parcel)
        if stream.is_leaf:  # a payload as it came: the engine receives every later step into this tensor, and hooks on it would stay
            stream = stream.view_as(stream)
        stream.register_hook(lambda gradient: self._pass(current, parcel.block))
        with parcel.hooks():
            if courier.choices[parcel.block] == "recompute":
                output = checkpoint(self._counting(block), stream, use_reentrant=False, preserve_rng_state=False)
            else:
                output = block(stream)
        courier.end_forward(parcel)
        if len(current.parcels) == len(courier.blocks):
            output.register_hook(lambda gradient: self._pass(current, len(courier.blocks)))
        return output

    def _counting(self, block: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Count every run of a block but the first."""
        runs = 0

        def counted(stream: Tensor) -> Tensor:
            nonlocal runs
            self.recomputed += runs > 0
            runs += 1
            return block(stream)

        return counted

    def _pass(self, current: Microbatch, block: int) -> None:
        """Go from the backward of a block to that of the one before it: the gradient between them is there."""
        if block < len(current.parcels):
            self.courier.end_backward(current.parcels[block])
        if block > 0:
            self.courier.start_backward(current.parcels[block - 1])
            return
        self._alive.remove(current)
        current.ends.count(-current.ends.counted)
        if self._alive and self._started == self.microbatches:
            self.courier.want(self._alive[0].parcels)


def held(stage: Stage) -> list[Tensor]:
    """Return the tensors that a stage holds anyway: parameters and tables, and the embedding that a tied head borrows."""
    return [*stage.parameters(), *stage.buffers(), *getattr(getattr(stage, "head", None), "borrowed", ())]


def lasting(stage: Stage) -> frozenset[int]:
    """Return the addresses of what a stage holds anyway: it is no activation."""
    return frozenset(map(address, held(stage)))


def block_names(stage: Stage) -> list[str]:
    """Name the blocks of a stage: its layers, and behind the last one of all the head with the loss."""
    return [f"layer {layer}" for layer in stage.plan.layers] + (["head"] if stage.plan.last else [])
