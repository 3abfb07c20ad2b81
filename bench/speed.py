"""How well a training step uses the machine: tokens/s and the share of the CPU's matmul peak, for each side and precision.

    .venv/bin/python bench/speed.py [--config small] [--repeats 7]

The sides alternate inside one run on one thread; medians are shown. Peak is the best of a few large fp32 matrix products measured in the
same run. Counted are the multiplications of matrices and attention, forward and backward, not norms, softmax and optimizer.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from thinwire.config.sections import RunConfig
from thinwire.data.open import open_data
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import Pipeline, build_pipeline
from thinwire.run.command import parse_train
from timing import alternate, medians

SIDES = {
    "dense": "--codec.name dense",
    "subspace": "--codec.name subspace",
    "subspace 8 bits": "--codec.name subspace --codec.bits 8",
    "dense bf16": "--codec.name dense --train.dtype bf16",
    "subspace bf16": "--codec.name subspace --train.dtype bf16",
}


def matmul_peak() -> float:
    """Return the best fp32 matmul rate on this thread, in operations per second."""
    best = 0.0
    for size in (512, 1024, 1536):
        left, right = torch.randn(size, size), torch.randn(size, size)
        torch.mm(left, right)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            torch.mm(left, right)
            times.append(time.perf_counter() - started)
        best = max(best, 2 * size**3 / statistics.median(times))
    return best


def operations_per_token(pipeline: Pipeline, context: int) -> float:
    """Count multiply-adds of matrix products and causal attention, forward and backward, times two."""
    weights = reads = 0
    for stage in pipeline.stages:
        weights += sum(p.numel() for name, p in stage.named_parameters() if p.dim() == 2 and not name.startswith("embedding"))
        basis = getattr(stage.stream, "basis_DK", None)
        # Reading x = fixed + U c twice per constrained block; its backward has one product, not two: U is not trained.
        bound = sum(layer < stage.constrained for layer in stage.plan.layers)
        reads += 0 if basis is None else (2 * bound + stage.plan.last) * basis.numel()
    model = pipeline.stages[0].model
    attention = model.layers * 2 * (context / 2) * model.heads * model.head_size
    return 2 * (3 * weights + 2 * reads + 3 * attention)


class Side:
    """One pipeline with its optimizers, ready to step."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.done = config, 0
        self.data = open_data(config.data, config.model, config.seed)
        self.pipeline = build_pipeline(config, torch.device("cpu"))
        self.optimizers = [StageOptimizer(stage, config.train) for stage in self.pipeline.stages]

    def step(self) -> None:
        first = self.done * self.config.train.batch
        self.pipeline.step(torch.from_numpy(self.data.train.batch(first, self.config.train.batch)), self.done, first)
        for optimizer in self.optimizers:
            optimizer.step(1.0, 1.0)
        self.done += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="small")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sides = {
        name: Side(
            parse_train(["--config", arguments.config, "--pipeline.mode", "inprocess", "--run", "unused", *SIDES[name].split()]).config
        )
        for name in arguments.sides
    }
    peak = matmul_peak()
    found = medians(alternate({name: side.step for name, side in sides.items()}, arguments.repeats))
    table = Table(title=f"{arguments.config}, one thread, median of {arguments.repeats}; fp32 matmul peak {peak / 1e9:.0f} GFLOP/s")
    for heading in ("side", "s/step", "tokens/s", "share of peak", "step time to dense"):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for name, seconds in found.items():
        model, batch = sides[name].config.model, sides[name].config.train.batch
        tokens = batch * model.context
        share = operations_per_token(sides[name].pipeline, model.context) * tokens / seconds / peak
        table.add_row(name, f"{seconds:.3f}", f"{tokens / seconds:,.0f}", f"{100 * share:.0f} %", f"{seconds / found['dense']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
