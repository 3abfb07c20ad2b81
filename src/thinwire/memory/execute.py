"""Run the blocks of a stage as a plan says: keep what autograd saves, copy it to slow memory and back, or compute it again.

The gradients are those of the plain run, bit for bit: what is offloaded comes back as it was, and what is computed again draws the same
numbers, because all dropout is a function of (seed, step, sample, layer). Put in place with `stage.runner = Executor(...)`.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from thinwire.memory.offload import OffloadThread
from thinwire.memory.saved_tensors import SavedTensors, address
from thinwire.model.stage import PLAIN, Runner, Stage


class Microbatch:
    """The saved tensors of one microbatch: those of the blocks in their order, and what the stage's ends keep."""

    def __init__(self, exempt: frozenset[int], count: Callable[[int], None]) -> None:
        self.exempt = exempt
        self.saved: list[SavedTensors] = []
        self.ends = SavedTensors(-1, exempt, count)


class Executor(Runner):
    """Run one stage's blocks within the room that its offload thread keeps."""

    def __init__(self, stage: Stage, offload: OffloadThread, microbatches: int = 1, before_step: Callable[[], None] = lambda: None) -> None:
        """Follow the plan of an offload thread in steps of so many microbatches, `offload.in_flight` of them alive at once."""
        self.stage, self.offload, self.microbatches, self._before_step = stage, offload, microbatches, before_step
        self.recomputed = 0
        """Blocks that were computed again, so far."""
        self._current: Microbatch | None = None
        if "recompute" in offload.choices:
            importlib.import_module("torch._dynamo")  # checkpointing does, at a length that belongs to no step
        self.begin()

    @property
    def problem(self) -> ValueError | None:  # type: ignore[override]
        return self.offload.problem

    def begin(self) -> None:
        """Begin a step: nothing of the one before is left, however it ended."""
        self.offload.clear()
        self._alive: deque[Microbatch] = deque()
        self._started, self._step = 0, -1
        self._lasting = lasting(self.stage)

    def close(self) -> None:
        """Let the stage run plainly again, and end the offload thread."""
        self.stage.runner = PLAIN
        self._alive.clear()
        self.offload.close()

    @contextmanager
    def microbatch(self, step: int, received: Sequence[Tensor]) -> Iterator[None]:
        if step != self._step or self._started == self.microbatches:
            self.begin()
            self._before_step()
            self._step = step
        self._current = current = Microbatch(self._lasting | {address(tensor) for tensor in received}, self.offload.count)
        with current.ends.hooks():
            yield
        current.ends.close()
        self._current = None
        self._alive.append(current)
        self._started += 1
        if len(self._alive) == self.offload.in_flight or self._started == self.microbatches:
            self.offload.want(self._alive[0].saved)

    def run(self, block: Callable[[Tensor], Tensor], stream: Tensor) -> Tensor:
        current, offload = self._current, self.offload
        assert current is not None
        saved = SavedTensors(len(current.saved), current.exempt, offload.count)
        offload.start_forward(saved.block)
        current.saved.append(saved)
        if stream.is_leaf:  # a payload as it came: the engine receives every later step into this tensor, and hooks on it would stay
            stream = stream.view_as(stream)
        stream.register_hook(lambda gradient: self._pass(current, saved.block))
        with saved.hooks():
            if offload.choices[saved.block] == "recompute":
                output = checkpoint(self._counting(block), stream, use_reentrant=False, preserve_rng_state=False)
            else:
                output = block(stream)
        offload.end_forward(saved)
        if len(current.saved) == len(offload.blocks):
            output.register_hook(lambda gradient: self._pass(current, len(offload.blocks)))
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
        if block < len(current.saved):
            self.offload.end_backward(current.saved[block])
        if block > 0:
            self.offload.start_backward(current.saved[block - 1])
            return
        self._alive.remove(current)
        current.ends.count(-current.ends.counted)
        if self._alive and self._started == self.microbatches:
            self.offload.want(self._alive[0].saved)


def held(stage: Stage) -> list[Tensor]:
    """Return the tensors that a stage holds anyway: parameters and tables, and the embedding that a tied head borrows."""
    return [*stage.parameters(), *stage.buffers(), *getattr(getattr(stage, "head", None), "borrowed", ())]


def lasting(stage: Stage) -> frozenset[int]:
    """Return the addresses of what a stage holds anyway: it is no activation."""
    return frozenset(map(address, held(stage)))


def block_names(stage: Stage) -> list[str]:
    """Name the blocks of a stage: its layers, and behind the last one of all the head with the loss."""
    return [f"layer {layer}" for layer in stage.plan.layers] + (["head"] if stage.plan.last else [])
