"""What the engine costs beside the arithmetic: a step of `laptop` by 4 workers on `open`, against the bound that the cores give.

    .venv/bin/python bench/engine_cost.py [--repeats 3] [--codec subspace]

Bound, with N cores: (C + C / (M S)) / N seconds per step. C is the compute of all S stages for M microbatches and their optimizers on
one core while the other cores do the same, measured by N processes at once, each with the whole model (packing is not counted in). The
second term is the schedule's bubble: while the first stage runs its first forward and its last backward no other stage has work, so the
cores but one stand still for one microbatch of one stage. Bound and workers alternate in one run; medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine_bench import write_results
from thinwire.data.open import open_data
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import build_pipeline
from thinwire.run.command import parse_train
from trained import train

GOAL = 0.85
COMPUTE_STEPS = 4
WORKER_STEPS = 10


def compute(words: list[str], start: Barrier, answers: Any) -> None:
    """Step the whole model on one thread; answer with the seconds of each step, packing left out."""
    torch.set_num_threads(1)
    config = parse_train(words).config
    data = open_data(config.data, config.model, config.seed)
    pipeline = build_pipeline(config, torch.device("cpu"))
    optimizers = [StageOptimizer(stage, config.train) for stage in pipeline.stages]
    seconds = []
    for step in range(1 + COMPUTE_STEPS):
        batch = torch.from_numpy(data.train.batch(step * config.train.batch, config.train.batch))
        start.wait()  # every step anew, so that all processes compute all the time
        started = time.perf_counter()
        pipeline.step(batch, step, 0)
        for optimizer in optimizers:
            optimizer.squared_norm()
            optimizer.step(1.0, 1.0)
        seconds.append(time.perf_counter() - started - sum(pipeline.traffic.take_seconds().values()))
    answers.put(seconds[1:])


def measure_compute(words: list[str], cores: int) -> float:
    """Return C: the median over processes and steps."""
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(cores), context.SimpleQueue()
    processes = [context.Process(target=compute, args=(words, start, answers)) for _ in range(cores)]
    for process in processes:
        process.start()
    found = [second for _ in processes for second in answers.get()]
    for process in processes:
        process.join()
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--codec", default="subspace")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    words = ["--config", "laptop", "--pipeline.mode", "inprocess", "--run", "unused", "--codec.name", arguments.codec]
    pipeline = parse_train(words).config.pipeline
    turns = []
    for _ in range(arguments.repeats):
        whole = measure_compute(words, cores)
        trained = train(f"--codec.name {arguments.codec} --link.profile open", WORKER_STEPS)
        bound = (whole + whole / (pipeline.microbatches * pipeline.stages)) / cores
        turns.append({"compute": whole, "bound": bound, "step": trained.step_seconds, "waits": trained.wait_share})
        turns[-1]["share"] = bound / trained.step_seconds
    table = Table(title=f"laptop, {arguments.codec}, {pipeline.stages} workers, {cores} cores: s/step, {arguments.repeats} turns")
    for heading in ("turn", "compute on one core", "bound", "workers", "share of the bound", "each stage waits"):
        table.add_column(heading, justify="right")
    for number, turn in enumerate(turns, 1):
        waits = " ".join(f"{100 * share:.0f} %" for share in turn["waits"])
        cells = (f"{turn['compute']:.3f}", f"{turn['bound']:.3f}", f"{turn['step']:.3f}", f"{turn['share']:.3f}", waits)
        table.add_row(str(number), *cells)
    Console(width=120).print(table)
    share = statistics.median(turn["share"] for turn in turns)
    print(f"median share of the bound {share:.3f} (goal {GOAL})")
    write_results("engine_cost", {"codec": arguments.codec, "share": share, "turns": turns})


if __name__ == "__main__":
    main()
