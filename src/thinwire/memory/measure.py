"""Measure a stage on this machine: times and bytes of each block, what is always there, and how fast the slow memory is.

One block is in memory at a time, so a stage that does not fit can be measured too: every block is run forward and back on its own, with
gradients of zero, and handed the result on. Weights, random state and the state of codecs stay as they are.
"""

from __future__ import annotations

import copy
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.config.sections import RunConfig
from thinwire.memory.account import Live, always_there, between_steps, wire_of
from thinwire.memory.blocks import Bandwidth, BlockCost, Profile
from thinwire.memory.execute import block_names, held, lasting
from thinwire.memory.offload import worth_moving
from thinwire.memory.saved_tensors import SavedTensors, address
from thinwire.memory.slow_memory import CHUNK, measure_bandwidth
from thinwire.model.cut import cut_layers
from thinwire.model.stage import Runner, Stage, build_stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import build_codec
from thinwire.pipeline.static_stage import EngineModule, example_inputs, payloads_of

RUNS = 3
"""Timed runs of each block, of which the middle one counts."""
BLOCK_SECONDS = 1.0
"""A block that has taken this long is not run again."""
MMAP_THRESHOLD = -3
"""The number of that setting in glibc's malloc.h."""
MAPPED_BYTES = 256 * 2**10
"""From this size on a piece of memory is mapped."""


@dataclass
class Measured:
    """What was found of one block."""

    saved_bytes: int
    input_bytes: int
    parameter_bytes: int
    working_bytes: int = 0
    """Temporary tensors beside what the block keeps, at the fullest moment of its forward and backward."""
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)

    @property
    def form(self) -> tuple[int, int, int]:
        return self.saved_bytes, self.input_bytes, self.parameter_bytes


class BlockProfiler(Runner):
    """Run each block forward and back on its own, and note what it takes."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.found: list[Measured] = []
        self.ends = SavedTensors(-1, frozenset(), lambda size: None)
        self.device = stage.device

    @contextmanager
    def microbatch(self, step: int, received: Sequence[Tensor]) -> Iterator[None]:
        self.exempt = lasting(self.stage) | {address(tensor) for tensor in received}
        self.ends = SavedTensors(-1, self.exempt, lambda size: None)
        with self.ends.hooks():
            yield

    def run(self, block: Callable[[Tensor], Tensor], stream: Tensor) -> Tensor:
        stream = stream.detach().requires_grad_()
        first, output, _, _ = self._once(block, stream)
        kept = stream.untyped_storage().nbytes()
        there = held(self.stage)
        parameters = sum(tensor.nbytes for tensor in there if tensor.grad is not None)
        found = Measured(first.size - (kept if address(stream) in first.addresses else 0), kept, parameters)
        started = time.monotonic()
        while len(found.forward_seconds) < RUNS and time.monotonic() - started < BLOCK_SECONDS:
            _, _, forward, backward = self._once(block, stream)
            found.forward_seconds.append(forward)
            found.backward_seconds.append(backward)
        with Live([stream, *there, *(tensor.grad for tensor in there if tensor.grad is not None)]) as live:
            self._once(block, stream)
        # The gradient of the input is the next block's, and counts here while it is being made.
        found.working_bytes = max(0, live.peak - found.saved_bytes)
        self.found.append(found)
        for tensor in there:
            tensor.grad = None
        return output.requires_grad_()

    def _once(self, block: Callable[[Tensor], Tensor], stream: Tensor) -> tuple[SavedTensors, Tensor, float, float]:
        """Return what a block keeps, its output, and the seconds of its forward and backward."""
        saved = SavedTensors(len(self.found), self.exempt, lambda size: None)
        started = self._now()
        with torch.enable_grad(), saved.hooks():
            output = block(stream)
        middle = self._now()
        torch.autograd.backward(output, torch.zeros_like(output))
        stream.grad = None
        return saved, output.detach(), middle - started, self._now() - middle

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def profile_stage(config: RunConfig, index: int, device: torch.device, folder: Path = Path(".")) -> Profile:
    """Build a stage and measure it; `folder` is where it would offload to if the config names none."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    codec = build_codec(config)
    ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    if not 0 <= index < len(ranges):
        raise ValueError(f"there is no stage {index}: pipeline.stages is {len(ranges)}; choose 0 to {len(ranges) - 1}")
    stage = build_stage(config.model, ranges, index, codec, config.seed).to(device)
    return measure_stage(stage, codec, config, folder)


def measure_stage(stage: Stage, codec: Codec, config: RunConfig, folder: Path) -> Profile:
    """Measure a stage and the slow memory of its run, as they are when it is trained."""
    return_freed_memory()  # first, for what is measured is to be what is run
    return make_profile(stage, codec, config, measure_bandwidth(stage.device, slow_folder(config, folder)))


def make_profile(stage: Stage, codec: Codec, config: RunConfig, bandwidth: Bandwidth) -> Profile:
    """Measure a stage that is there, and leave it as it was."""
    batch = config.microbatch
    observer = observe(stage, codec, config, batch)
    # All blocks share the working memory of a layer. The head, last of all, needs more than that: it counts as if it kept the rest.
    working = max(found.working_bytes for found in observer.found[: len(stage.layers)])
    blocks = tuple(block_of(name, found, observer.found, working) for name, found in zip(block_names(stage), observer.found, strict=True))
    kinds = always_there(stage, codec, config)
    kinds["working memory"] = working + CHUNK
    between, slim_between = between_steps(stage, config.train, kinds)
    return Profile(
        blocks,
        bandwidth,
        fixed_bytes=sum(kinds.values()),
        payload_bytes=wire_of(stage, codec, config).flight_bytes + observer.ends.size,
        microbatches=config.pipeline.microbatches,
        optimizer_bytes=sum(worth_moving(StageOptimizer(stage, config.train).state_sizes())),
        between_bytes=between,
        slim_between_bytes=slim_between,
        kinds=kinds,
    )


def block_of(name: str, found: Measured, everything: Sequence[Measured], working: int) -> BlockCost:
    """Say what was found of a block; blocks of the same form take the same time, so all their runs count for each of them."""
    alike = [other for other in everything if other.form == found.form]
    return BlockCost(
        name,
        statistics.median(seconds for other in alike for seconds in other.forward_seconds),
        statistics.median(seconds for other in alike for seconds in other.backward_seconds),
        found.saved_bytes + max(0, found.working_bytes - working),
        found.input_bytes,
        found.parameter_bytes,
    )


def observe(stage: Stage, codec: Codec, config: RunConfig, batch: int) -> BlockProfiler:
    """Run one microbatch of examples through a stage; its ends are copies, so that theirs learn nothing from it."""
    observer, before = BlockProfiler(stage), (stage.runner, stage.entries, stage.exits)
    stage.runner, stage.entries, stage.exits = observer, copy.deepcopy(stage.entries), copy.deepcopy(stage.exits)
    try:
        module = EngineModule(stage, config.train.dtype)
        ids, *payload = example_inputs(module, payloads_of(module.stage, codec, batch), batch)
        module(ids, *payload, samples_B=torch.arange(batch, device=ids.device))
    finally:
        stage.runner, stage.entries, stage.exits = before
        stage.zero_grad(set_to_none=True)
    return observer


def slow_folder(config: RunConfig, run: Path) -> Path:
    """Return the folder for what is offloaded: the one that was named, else the run folder or, before it is made, where it will be."""
    named = config.memory.folder
    if named is not None:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise ValueError(f"memory.folder {named} is no folder; make it, or name another on a disk with room")
        return folder
    run = run.absolute()
    return next(folder for folder in (run, *run.parents) if folder.is_dir())


def return_freed_memory() -> bool:
    """Fix the size from which memory is mapped, for this process; return whether its allocator knows such a thing.

    glibc raises that size, up to 32 MB, each time such a piece is freed, and keeps what is smaller in heaps full of holes: a stage within
    its budget by our count then held 1.8 times as much of the machine's memory. With a fixed size every tensor of some length is mapped
    when it is made and given back when it is freed.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # another C library
        return False
    return bool(library.mallopt(MMAP_THRESHOLD, MAPPED_BYTES))
