"""Does a stage within a memory budget take the time and the memory that were predicted?

    .venv/bin/python bench/budget.py [--rounds 5] [--nap]   measured against simulated steps: four strategies, slow memory of four rates
    .venv/bin/python bench/budget.py --rss                  peak of the process against the predicted peak, in fresh processes

Time: one stage of 8 real layers, room for the activations of 4 of them, slow memory that is a file held back to a rate. The rate is in
blocks per forward of a block, as in the table of docs/memory.md. The strategies take turns within a round, and every round begins with
a plain step, without any limit; its ratio to the simulated ideal says how far the machine is from what the profile saw. With --nap the
layers sleep instead of computing: hooks, copies and waiting are the real ones, and other work on the machine does little harm.
Memory: a model of one stage whose activations alone are above 500 MB, trained for a few steps. Both want an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from engine_bench import write_results
from thinwire.codecs.build import codec_defaults
from thinwire.config.sections import MemoryConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig
from thinwire.memory.attach import limit, plan_for
from thinwire.memory.blocks import Bandwidth, BlockCost, Choice, Plan, Profile, base_bytes, floor_bytes
from thinwire.memory.execute import Executor
from thinwire.memory.measure import measure_stage
from thinwire.memory.offload import OffloadThread, slow_bytes
from thinwire.memory.plan import compare_strategies, predict
from thinwire.memory.slow_memory import FileMemory
from thinwire.model.cut import cut_layers
from thinwire.model.ends import Context
from thinwire.model.stage import PLAIN, build_stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import build_codec, build_pipeline

CPU = torch.device("cpu")
RATES = (0.25, 0.34, 0.5, 1.0)
"""Blocks per forward of a block."""
STRATEGIES = ("offload all", "recompute all", "capacity only", "hybrid")
BLOCKS, ROOM, MICROBATCHES = 8, 4, 2
NAP_SECONDS, NAP_BYTES = 0.05, 4_000_000
"""Forward and bytes of a block without arithmetic; its backward takes twice as long."""
TOLERANCE, FASTEST = 0.15, 0.03
CASES = ((1.0, "hybrid"), (0.75, "hybrid"), (0.6, "hybrid"), (0.6, "recompute"))
"""Budgets as shares of what the stage needs if everything is kept, and who plans; `recompute` recomputes first blocks instead."""


def timing_config() -> RunConfig:
    """Describe the stage that is timed: the first of two, all layers but one."""
    return RunConfig(
        model=ModelConfig(vocabulary=512, width=768, layers=BLOCKS + 1, heads=12, kv_heads=12, ffn=2048, context=128),
        train=TrainConfig(batch=2 * MICROBATCHES, threads=1),
        pipeline=PipelineConfig(stages=2, split=f"{BLOCKS},1", microbatches=MICROBATCHES, mode="inprocess"),
        codec=codec_defaults("dense"),
        memory=MemoryConfig(budget="1TB"),
    )


class Nap(torch.autograd.Function):
    """Take as long as a block's forward and backward would, and keep as many bytes."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor) -> Tensor:
        time.sleep(NAP_SECONDS)
        ctx.save_for_backward(torch.empty(NAP_BYTES, dtype=torch.uint8))
        return stream.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert ctx.saved_tensors[0].nbytes == NAP_BYTES
        time.sleep(2 * NAP_SECONDS)
        return gradient


class NappingStage(nn.Module):
    """Stand in for a `Stage`: the same hooks and copies, no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.runner = PLAIN

    def forward(self, ids_BT1: Tensor, payload: tuple[Tensor, ...], context: Context) -> tuple[Tensor, ...]:
        stream = self.weight.expand(1).clone()
        with self.runner.microbatch(context.step, (ids_BT1,)):
            for _ in range(BLOCKS):
                stream = self.runner.run(Nap.apply, stream)
        return (stream,)


@dataclass
class Bench:
    """The stage that is timed, its profile, and one step's input."""

    stage: Any
    profile: Profile
    ids_BT1: Tensor
    gradient: Tensor

    @classmethod
    def make(cls, folder: Path, nap: bool) -> Bench:
        """Build a stage of real layers and measure it, or one whose times and bytes are known."""
        config = timing_config()
        ids = torch.randint(0, config.model.vocabulary, (2, config.model.context + 1))
        if nap:
            blocks = tuple(BlockCost(str(index), NAP_SECONDS, 2 * NAP_SECONDS, NAP_BYTES, 4) for index in range(BLOCKS))
            return cls(NappingStage(), Profile(blocks, Bandwidth(1.0, 1.0, False), 0, 0, MICROBATCHES), ids, torch.zeros(1))
        codec = build_codec(config)
        stage = build_stage(config.model, cut_layers(config.model.layers, 2, config.pipeline.split), 0, codec, 0)
        profile = measure_stage(stage, codec, config, folder)
        return cls(stage, profile, ids, torch.randn(2, config.model.context, config.model.width).bfloat16() * 1e-3)

    def step(self, executor: Executor | None) -> float:
        """Return the seconds of forward and backward of all microbatches."""
        self.stage.runner = executor or PLAIN
        self.stage.zero_grad(set_to_none=True)
        started = time.perf_counter()
        if executor is not None:
            executor.begin()
        for number in range(MICROBATCHES):
            (payload,) = self.stage(self.ids_BT1, (), Context(0, torch.arange(2) + 2 * number))
            torch.autograd.backward(payload, self.gradient)
        return time.perf_counter() - started

    @property
    def unit(self) -> float:
        """Bytes of a block over the seconds of its forward."""
        return statistics.median(block.all_bytes / block.forward_seconds for block in self.profile.blocks)

    @property
    def budget(self) -> int:
        return base_bytes(self.profile, 1) + ROOM * max(block.all_bytes for block in self.profile.blocks)


def time_rate(bench: Bench, rate: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Run all strategies with slow memory of one rate; return measured and simulated seconds of a step."""
    speed = rate * bench.unit
    profile = replace(bench.profile, bandwidth=Bandwidth(speed, speed, duplex=False))
    plans = {name: plan for name, plan in compare_strategies(profile, bench.budget).items() if name in STRATEGIES and plan is not None}
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", *plans)}
    with ExitStack() as stack:
        executors: dict[str, Executor | None] = {"plain": None}
        for name, plan in plans.items():
            executors[name] = executor = follow(bench, profile, plan, speed, folder)
            stack.callback(executor.close)
        for number in range(rounds + 1):
            for name, chosen in executors.items():
                taken = bench.step(chosen)
                seconds[name] += [taken] if number else []  # the first round warms up
        for name, chosen in executors.items():
            assert chosen is None or chosen.offload.counted_peak <= chosen.offload.peak <= chosen.offload.room, name
    rows = {
        name: {
            "choices": "".join(choice[0] for choice in plan.choices),
            "simulated": plan.seconds,
            "measured": statistics.median(seconds[name]),
            "ratio": statistics.median(seconds[name]) / plan.seconds,
            "seconds": seconds[name],
        }
        for name, plan in plans.items()
    }
    plain, ideal = statistics.median(seconds["plain"]), next(iter(plans.values())).ideal_seconds
    return {"rate": rate, "megabytes_per_second": speed / 1e6, "plain": plain, "ideal": ideal, "plain_ratio": plain / ideal, "rows": rows}


def follow(bench: Bench, profile: Profile, plan: Plan, speed: float, folder: Path) -> Executor:
    """Make the executor of a plan over slow memory of a rate."""
    size = slow_bytes(profile.blocks, plan.choices, 1)
    slow = FileMemory(folder, size, speed) if size else None
    offload = OffloadThread(profile.blocks, plan.choices, bench.budget - base_bytes(profile, 1), 1, slow)
    return Executor(bench.stage, offload, MICROBATCHES)


def run_times(rounds: int, folder: Path, nap: bool, console: Console) -> None:
    """Time all strategies at all rates; print and keep the figures."""
    results = []
    for rate in RATES:
        bench = Bench.make(folder, nap)  # measured anew, so that a machine that changes does less harm
        results.append(time_rate(bench, rate, rounds, folder))
        found = results[-1]
        table = Table(title=f"{rate} blocks per forward ({found['megabytes_per_second']:.0f} MB/s); plain step {found['plain_ratio']:.2f}x")
        for heading in ("strategy", "blocks", "simulated s", "measured s", "ratio", f"within {TOLERANCE:.0%}"):
            table.add_column(heading, justify="left" if heading in ("strategy", "blocks") else "right")
        for name, row in found["rows"].items():
            fits = "yes" if abs(row["ratio"] - 1) <= TOLERANCE else "no"
            table.add_row(name, row["choices"], f"{row['simulated']:.2f}", f"{row['measured']:.2f}", f"{row['ratio']:.3f}", fits)
        console.print(table)
        best = min(row["measured"] for row in found["rows"].values())
        behind = found["rows"]["hybrid"]["measured"] / best - 1
        found["hybrid_behind"] = behind
        console.print(f"the hybrid is {behind:.1%} behind the fastest: {'as it should be' if behind <= FASTEST else 'too far'}")
    write_results("memory_nap" if nap else "memory", results)


def memory_config(budget: str, folder: str) -> RunConfig:
    """Describe a model of one stage whose activations are large."""
    return RunConfig(
        model=ModelConfig(vocabulary=4096, width=384, layers=10, heads=6, kv_heads=6, ffn=1024, context=256),
        train=TrainConfig(batch=16, threads=1, optimizer="adamw"),
        pipeline=PipelineConfig(stages=1, microbatches=1, mode="inprocess"),
        codec=codec_defaults("dense"),
        memory=MemoryConfig(budget=budget, folder=folder),
    )


def status(word: str) -> int:
    """Return a size of this process as the kernel knows it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{word}:")]
    return int(line.split()[1]) * 1024


def recompute_first(profile: Profile, budget: int) -> Plan:
    """Recompute as many first blocks as the budget asks for."""
    count, room = len(profile.blocks), budget - base_bytes(profile, 1)
    shapes: list[tuple[Choice, ...]] = [("recompute",) * first + ("keep",) * (count - first) for first in range(count + 1)]
    choices = next(choices for choices in shapes if floor_bytes(profile.blocks, choices) <= room)
    plan = predict(profile, choices, 1, budget)
    assert plan is not None
    return plan


def train_within(share: float, planner: str, folder: str) -> dict[str, Any]:
    """Train a few steps in this process within a share of what the stage needs; return predicted and measured bytes."""
    config = memory_config("1TB", folder)
    pipeline = build_pipeline(config, CPU)
    (stage,) = pipeline.stages
    profile = measure_stage(stage, pipeline.codec, config, Path(folder))
    whole = base_bytes(profile, 1) + sum(block.all_bytes for block in profile.blocks)
    config = memory_config(f"{int(share * whole)}B", folder)
    plan = plan_for(profile, config, 1) if planner == "hybrid" else recompute_first(profile, int(share * whole))
    optimizer = StageOptimizer(stage, config.train)
    batch = torch.randint(0, config.model.vocabulary, (config.train.batch, config.model.context + 1))
    memory = limit(stage, optimizer, pipeline.codec, config, profile, plan, 1, Path(folder))
    with closing(memory):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the profile's own peak is not the run's
        for step in range(3):
            pipeline.step(batch, step, 0)
            optimizer.step(1.0, 1.0)
        peak = status("VmHWM") - before
        counted = memory.executor.offload.counted_peak
    there = profile.kinds["parameters"] + profile.kinds["basis and fixed table"]  # before the first step already
    return {
        "share": share,
        "choices": "".join(choice[0] for choice in plan.choices),
        "budget": int(share * whole),
        "activations": plan.peak_bytes - base_bytes(profile, 1),
        "counted_activations": counted,
        "predicted": plan.peak_bytes - there,
        "measured": peak,
        "ratio": peak / (plan.peak_bytes - there),
    }


def run_memory(folder: Path, console: Console) -> None:
    """Train in fresh processes within several budgets; print and keep the figures."""
    results = []
    for share, planner in CASES:
        command = [sys.executable, __file__, "--child", str(share), planner, "--folder", str(folder)]
        results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1200).stdout))
    table = Table(title="What three steps add to a process, in MB")
    for heading in ("budget", "blocks", "activations", "predicted", "measured", "ratio", f"within {TOLERANCE:.0%}"):
        table.add_column(heading, justify="left" if heading == "blocks" else "right")
    for row in results:
        sizes = [f"{row[name] / 1e6:,.0f}" for name in ("activations", "predicted", "measured")]
        fits = "yes" if abs(row["ratio"] - 1) <= TOLERANCE else "no"
        table.add_row(f"{row['budget'] / 1e6:,.0f}, {row['share']:.0%}", row["choices"], *sizes, f"{row['ratio']:.3f}", fits)
    console.print(table)
    write_results("memory_rss", results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nap", action="store_true", help="blocks that sleep: right on a busy machine, too")
    parser.add_argument("--rss", action="store_true")
    parser.add_argument("--folder", type=Path, help="where slow memory lies (default: a temporary folder)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child is not None:
        print(json.dumps(train_within(float(arguments.child[0]), arguments.child[1], str(arguments.folder))))
        return
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as scratch:
        folder = arguments.folder or Path(scratch)
        if arguments.rss:
            run_memory(folder, Console())
        else:
            run_times(arguments.rounds, folder, arguments.nap, Console())


if __name__ == "__main__":
    main()
