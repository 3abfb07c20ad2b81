"""Two workers of torch's own data parallelism with its PowerSGD hook, on scripted gradients: `python referee.py OUT RANK...`.

For each rank of the approximation it writes what the hook made of each step's gradients, and the order of its matrices. A process of its
own, because `torch.distributed` keeps its groups in the process.
"""

from __future__ import annotations

import multiprocessing
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

SHAPES = {"tall": (40, 12), "wide": (16, 6, 5), "small": (3, 4), "vector": (9,)}
WORKERS = 2
STEPS = 8
PLAIN_STEPS = 2
"""The hook averages plainly at first: fewer steps are refused."""
SEED = 5
FORMAT = torch.float64
"""In fp32 the two would drift apart by what their ways to orthonormal columns round differently."""


def scripted(step: int, worker: int) -> dict[str, torch.Tensor]:
    """Return gradients that share a slowly turning part of low rank, as those of a model do, under noise that differs by worker."""
    shared = torch.Generator().manual_seed(100)
    own = torch.Generator().manual_seed(1000 * step + worker)
    found = {}
    for name, shape in SHAPES.items():
        basis = torch.randn(4, *shape, generator=shared, dtype=FORMAT)
        turned = sum(basis[place] * np.cos(0.3 * step * (place + 1)) for place in range(4))
        found[name] = turned + 0.5 * torch.randn(shape, generator=own, dtype=FORMAT)
    return found


class Scripted(nn.Module):
    """A model whose gradients are whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape, dtype=FORMAT)) for name, shape in SHAPES.items()})

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((weight * gradients[name]).sum() for name, weight in self.weights.items())


def run(worker: int, out: str, ranks: list[int]) -> None:
    """Take the hook through the script as one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=worker, world_size=WORKERS)
    found = {rank: averaged(worker, rank) for rank in ranks}
    torch.save(found, f"{out}.{worker}")
    dist.destroy_process_group()


def averaged(worker: int, rank: int) -> dict:
    """Return the averages of all steps after the plain ones, and in which order the hook sees the parameters."""
    model = Scripted()
    parallel = nn.parallel.DistributedDataParallel(model)
    names = {weight: name for name, weight in model.weights.items()}
    order: list[list[str]] = []

    def hook(state, bucket):
        order.append([names[weight] for weight in bucket.parameters()])
        return powerSGD_hook(state, bucket)

    parallel.register_comm_hook(PowerSGDState(None, rank, PLAIN_STEPS, min_compression_rate=1, random_seed=SEED), hook)
    found = []
    for step in range(PLAIN_STEPS + STEPS):
        parallel.zero_grad()
        parallel(scripted(step, worker)).backward()
        found.append({name: weight.grad.clone() for name, weight in model.weights.items()})
    return {"steps": found[PLAIN_STEPS:], "order": order[-1]}


def first_factors(order: list[str], rank: int) -> dict[str, torch.Tensor]:
    """Draw what the hook draws for its first step: normal numbers for one matrix after the other, from a seed that its own seed gives."""
    generator = torch.Generator().manual_seed(int(np.random.RandomState(SEED).randint(1_000_000_000)))
    found = {}
    for name in order:
        rows, columns = SHAPES[name][0], int(np.prod(SHAPES[name][1:]))
        least = min(rows, columns, rank)
        if least * (rows + columns) < rows * columns:
            found[name] = torch.randn(1, columns, least, generator=generator, dtype=FORMAT)[0]
    return found


def main() -> None:
    out, ranks = sys.argv[1], [int(word) for word in sys.argv[2:]]
    context = multiprocessing.get_context("fork")  # one import of torch for both
    workers = [context.Process(target=run, args=(worker, out, ranks)) for worker in range(WORKERS)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in workers))


if __name__ == "__main__":
    main()
