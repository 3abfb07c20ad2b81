"""The memory of a run's stages: within a budget where there is one, counted in any case.

With a budget the steps are profile, plan, execute: `measure`, `make_plan`, `limit`. Without one `watch` counts the first step, in which
every later one's memory shows already, and lets go of the stage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.codecs.base import Codec
from thinwire.config.sections import RunConfig
from thinwire.memory.account import tensor_bytes, wire_of
from thinwire.memory.blocks import BlockCost, Choice, Plan, Profile, base_bytes
from thinwire.memory.execute import Executor, block_names
from thinwire.memory.measure import measure_stage, return_freed_memory, slow_folder
from thinwire.memory.offload import OffloadThread, OptimizerOffload, slow_bytes, worth_moving
from thinwire.memory.plan import make_plan
from thinwire.memory.slow_memory import aligned, lies_in_memory, measure_bandwidth, open_slow_memory
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.util.sizes import read_size


class StageMemory:
    """One stage's executor, and what it follows."""

    def __init__(
        self,
        executor: Executor,
        wire_bytes: int,
        profile: Profile | None = None,
        plan: Plan | None = None,
        budget: int = 0,
        state_offload: OptimizerOffload | None = None,
    ) -> None:
        self.executor, self.wire_bytes, self.profile, self.plan, self.budget = executor, wire_bytes, profile, plan, budget
        self.state_offload = state_offload
        self.optimizer: StageOptimizer | None = None
        self._steps = 0

    def adopt(self, optimizer: StageOptimizer) -> None:
        """Keep the state of this optimizer in slow memory between updates, if the plan says so."""
        self.optimizer, optimizer.offload = optimizer, self.state_offload

    def begin(self) -> None:
        """Begin a step."""
        if self.plan is None and self._steps == 1:
            self.executor.close()  # counted: all steps are alike
        elif self.plan is not None or self._steps == 0:
            self.executor.begin()
        if self.optimizer is not None:
            self.optimizer.put_away()  # a checkpoint that was restored has brought it here
        self._steps += 1

    def close(self) -> None:
        """Bring optimizer state back into memory, give slow memory back and end the thread."""
        if self.optimizer is not None and self.optimizer.offload is not None:
            with suppress(ValueError):  # the disk has failed, and whoever needs the state will hear of it
                self.optimizer.state_tensors()
                self.optimizer.offload = None
        self.executor.close()

    def peaks(self, optimizer: StageOptimizer) -> dict[str, Any]:
        """Return the peak of each kind in bytes, and with a budget what was planned."""
        stage, offload = self.executor.stage, self.executor.offload
        parameters = tensor_bytes(list(stage.parameters()))
        kinds = {
            "parameters": parameters,
            "gradients": parameters,
            "optimizer": sum(map(sum, optimizer.state_sizes())),
            "activations": offload.counted_peak,
            "wire_buffers": self.wire_bytes,
            "basis_and_fixed_table": tensor_bytes(list(stage.buffers())),
        }
        if self.profile is None or self.plan is None:
            return kinds | {"peak": sum(kinds.values()), "budget": None}
        kinds["working_memory"] = self.profile.kinds["working memory"]
        away = kinds["optimizer"] - self.profile.kinds["optimizer"] if self.plan.optimizer_out else 0
        peak = max(self.plan.between_bytes, sum(kinds.values()) - away)
        planned = {"planned_peak": self.plan.most_bytes, "choices": list(self.plan.choices), "in_flight": offload.in_flight}
        return kinds | {"peak": peak, "budget": self.budget, **planned, "optimizer_out": self.plan.optimizer_out}


class Memories:
    """The memory of all stages of this process; inside this context they are managed, after it they run plainly."""

    def __init__(self, stages: Sequence[StageMemory] = ()) -> None:
        self.stages = list(stages)

    def adopt(self, optimizers: Sequence[StageOptimizer]) -> None:
        """Know the optimizers of the stages."""
        for stage, optimizer in zip(self.stages, optimizers, strict=True):
            stage.adopt(optimizer)

    def begin(self) -> None:
        """Begin a step."""
        for stage in self.stages:
            stage.begin()

    def peaks(self, optimizers: Sequence[StageOptimizer]) -> list[dict[str, Any]]:
        """Return what each stage held at most."""
        return [stage.peaks(optimizer) for stage, optimizer in zip(self.stages, optimizers, strict=True)]

    def close(self) -> None:
        """Give slow memory back and end the threads."""
        for stage in self.stages:
            stage.close()

    def __enter__(self) -> Memories:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def measure(stage: Stage, codec: Codec, config: RunConfig, run: Path) -> Profile:
    """Measure a stage of a run that has a budget."""
    return_freed_memory()  # first, for what is measured is to be what is run
    device = stage.cosine_TS.device
    return measure_stage(stage, codec, config, measure_bandwidth(device, slow_folder(config, run)))


def plan_for(profile: Profile, config: RunConfig, depth: int) -> Plan:
    """Make the plan for the budget of a run, whose pipeline wants so many microbatches in flight."""
    assert config.memory.budget is not None
    return make_plan(profile, read_size(config.memory.budget), depth)


def limit(stage: Stage, codec: Codec, config: RunConfig, profile: Profile, plan: Plan, in_flight: int, run: Path) -> StageMemory:
    """Let a stage run within its budget, with at most so many microbatches in flight."""
    assert config.memory.budget is not None and in_flight <= plan.in_flight
    return_freed_memory()
    budget, device, profile = read_size(config.memory.budget), stage.cosine_TS.device, profile.under(plan)
    activations = slow_bytes(profile.blocks, plan.choices, in_flight)
    states = StageOptimizer(stage, config.train).state_sizes() if plan.optimizer_out else []
    size = activations + sum(map(aligned, worth_moving(states)))
    folder = slow_folder(config, run)
    if size and device.type == "cpu" and lies_in_memory(folder):
        print(
            f"thinwire: warning: {folder} lies in memory: what is offloaded takes {size / 1e6:.0f} MB of it beside the budget; "
            "name a --memory.folder on a disk",
            file=sys.stderr,
            flush=True,
        )
    slow = open_slow_memory(device, folder, size) if size else None
    offload = OffloadThread(profile.blocks, plan.choices, budget - base_bytes(profile, in_flight), in_flight, slow)
    stage.runner = executor = Executor(stage, offload, config.pipeline.microbatches)
    state_offload = OptimizerOffload(offload, activations) if plan.optimizer_out else None
    return StageMemory(executor, wire_bytes(stage, codec, config, in_flight), profile, plan, budget, state_offload)


def watch(stage: Stage, codec: Codec, config: RunConfig, in_flight: int) -> StageMemory:
    """Let a stage run as it is and count what autograd keeps."""
    blocks = [BlockCost(name, 0.0, 0.0, 0, 0) for name in block_names(stage)]
    choices: list[Choice] = ["keep"] * len(blocks)
    stage.runner = executor = Executor(stage, OffloadThread(blocks, choices, float("inf"), in_flight), config.pipeline.microbatches)
    return StageMemory(executor, wire_bytes(stage, codec, config, in_flight))


def wire_bytes(stage: Stage, codec: Codec, config: RunConfig, in_flight: int) -> int:
    """Return what the boundaries of a stage hold."""
    wire = wire_of(stage, codec, config)
    return wire.fixed_bytes + in_flight * wire.flight_bytes
