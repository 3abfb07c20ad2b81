"""Let the stages of a pipeline run within the memory budget of a run: measure, plan, agree on what is in flight, execute.

`attach_memory` is the one way in: `run/` calls it where there is a budget, and imports nothing of this folder where there is none. A
stage is changed in one place, its runner; the pipeline does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.codecs.base import Codec
from thinwire.config.sections import RunConfig
from thinwire.memory.account import tensor_bytes, trained_bytes, wire_of
from thinwire.memory.blocks import Plan, Profile, base_bytes
from thinwire.memory.execute import Executor
from thinwire.memory.measure import measure_stage, slow_folder
from thinwire.memory.offload import OffloadThread, OptimizerOffload, slow_bytes, worth_moving
from thinwire.memory.plan import make_plan
from thinwire.memory.slow_memory import aligned, lies_in_memory, open_slow_memory
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.protocols import Compute
from thinwire.pipeline.schedule import check_bounded
from thinwire.util.sizes import read_size


class StageMemory:
    """One stage within its budget."""

    def __init__(self, executor: Executor, optimizer: StageOptimizer, wire_bytes: int, profile: Profile, plan: Plan, budget: int) -> None:
        self.executor, self.optimizer, self.wire_bytes = executor, optimizer, wire_bytes
        self.profile, self.plan, self.budget = profile, plan, budget

    def close(self) -> None:
        """Bring optimizer state back into memory, give slow memory back and end the thread."""
        if self.optimizer.offload is not None:
            with suppress(ValueError):  # the disk has failed, and whoever needs the state will hear of it
                self.optimizer.state_tensors()
                self.optimizer.offload = None
        self.executor.close()

    def peaks(self) -> dict[str, Any]:
        """Return the peak of each kind in bytes, and what was planned."""
        stage, offload, plan = self.executor.stage, self.executor.offload, self.plan
        parameters = trained_bytes(stage)
        kinds = {
            **({"base": self.profile.kinds["frozen base"]} if stage.frozen else {}),
            "parameters": parameters,
            "gradients": parameters,
            "optimizer": sum(map(sum, self.optimizer.state_sizes())),
            "activations": offload.counted_peak,
            "wire_buffers": self.wire_bytes,
            "basis_and_fixed_table": tensor_bytes(list(stage.buffers())),
            "working_memory": self.profile.kinds["working memory"],
        }
        away = kinds["optimizer"] - self.profile.under(plan).kinds["optimizer"]
        return kinds | {
            "peak": max(plan.between_bytes, sum(kinds.values()) - away),
            "budget": self.budget,
            "planned_peak": plan.most_bytes,
            "choices": list(plan.choices),
            "in_flight": offload.in_flight,
            "optimizer_out": plan.optimizer_out,
        }


class MemoryBudget:
    """The stages of this process within their budget; after this context they run plainly."""

    def __init__(self) -> None:
        self.stages: list[StageMemory] = []

    @property
    def profiles(self) -> list[Profile]:
        """Return what was measured: a later pipeline of the same stages can be planned from it."""
        return [stage.profile for stage in self.stages]

    def peaks(self) -> list[dict[str, Any]]:
        """Return what each stage held at most."""
        return [stage.peaks() for stage in self.stages]

    def close(self) -> None:
        """Give slow memory back and end the threads."""
        for stage in self.stages:
            stage.close()

    def __enter__(self) -> MemoryBudget:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def attach_memory(
    compute: Compute, optimizers: Sequence[StageOptimizer], config: RunConfig, run: Path, profiles: Sequence[Profile] = ()
) -> MemoryBudget:
    """Let the stages of a pipeline run within the budget of a run; `profiles` are what was measured of them before, if anything was."""
    if config.pipeline.mode == "workers":
        check_bounded(config.pipeline.schedule)
    profiles = profiles or [measure_stage(stage, compute.codec, config, run) for stage in compute.stages]
    wanted = [compute.in_flight[stage.plan.index] for stage in compute.stages]
    plans = [plan_for(profile, config, depth) for profile, depth in zip(profiles, wanted, strict=True)]
    agreed = compute.bound_in_flight([plan.in_flight for plan in plans])
    memory = MemoryBudget()
    try:
        for stage, optimizer, profile, plan in zip(compute.stages, optimizers, profiles, plans, strict=True):
            in_flight = agreed[stage.plan.index]
            if in_flight < plan.in_flight:  # a stage before this one holds fewer: there is more room for each
                other = plan_for(profile, config, in_flight)
                plan = other if other.in_flight == in_flight else plan
            memory.stages.append(limit(stage, optimizer, compute.codec, config, profile, plan, in_flight, run))
    except BaseException:
        memory.close()
        raise
    return memory


def plan_for(profile: Profile, config: RunConfig, depth: int) -> Plan:
    """Make the plan for the budget of a run, whose pipeline wants so many microbatches in flight."""
    assert config.memory.budget is not None
    return make_plan(profile, read_size(config.memory.budget), depth)


def limit(
    stage: Stage,
    optimizer: StageOptimizer,
    codec: Codec,
    config: RunConfig,
    profile: Profile,
    plan: Plan,
    in_flight: int,
    run: Path,
) -> StageMemory:
    """Let a stage follow a plan, with at most so many microbatches in flight."""
    assert config.memory.budget is not None and in_flight <= plan.in_flight
    budget, device, planned = read_size(config.memory.budget), stage.device, profile.under(plan)
    activations = slow_bytes(planned.blocks, plan.choices, in_flight)
    size = activations + sum(map(aligned, worth_moving(optimizer.state_sizes() if plan.optimizer_out else [])))
    folder = slow_folder(config, run)
    if size and device.type == "cpu" and lies_in_memory(folder):
        print(
            f"thinwire: warning: {folder} lies in memory: what is offloaded takes {size / 1e6:.0f} MB of it beside the budget; "
            "name a --memory.folder on a disk",
            file=sys.stderr,
            flush=True,
        )
    slow = open_slow_memory(device, folder, size) if size else None
    thread = OffloadThread(planned.blocks, plan.choices, budget - base_bytes(planned, in_flight), in_flight, slow)
    optimizer.offload = OptimizerOffload(thread, activations) if plan.optimizer_out else None
    # A checkpoint that was restored or written has brought optimizer state here.
    stage.runner = executor = Executor(stage, thread, config.pipeline.microbatches, before_step=optimizer.put_away)
    wire = wire_of(stage, codec, config)
    return StageMemory(executor, optimizer, wire.fixed_bytes + in_flight * wire.flight_bytes, profile, plan, budget)
