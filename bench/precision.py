"""What `--train.dtype bf16` rounds with the subspace codec: reads of x = fixed + U c, the loss and the gradients, against fp64.

    .venv/bin/python bench/precision.py [--config small] [any words of `thinwire train`]

One batch through the stages of a config as it starts, nothing is trained. A read's error is |x - (fixed + U c)| / |U c| for the same
coordinates c: how much of the dynamic part is lost when `fixed`, which is much larger, is added to it. "First matrix" is the same of
norm(x) in the format in which a matrix product takes it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from thinwire.config.sections import Dtype, RunConfig
from thinwire.data.open import open_data
from thinwire.model.subspace.stream import SubspaceStream
from thinwire.pipeline.inprocess import Pipeline, build_pipeline
from thinwire.run.command import parse_train

Gradients = dict[str, Tensor]


Errors = list[tuple[float, float]]
"""Of every read, in their order: of x, and of norm(x) as a matrix takes it."""


def watch_reads(stream: SubspaceStream, errors: Errors, dtype: Dtype) -> None:
    """Note the errors of every read of a stage."""
    plain = stream.read
    taken_in = torch.bfloat16 if dtype == "bf16" else torch.float32

    def read(coordinates: Tensor, static: Tensor | None) -> Tensor:
        hidden_BTD = plain(coordinates, static)
        assert static is not None
        fixed_BTD = static if static.is_floating_point() else stream.fixed(static)
        dynamic_BTD = coordinates.detach().double() @ stream.basis_DK.double().T
        exact_BTD = fixed_BTD.double() + dynamic_BTD
        found_BTD, size_BT1 = hidden_BTD.detach().double(), exact_BTD.square().mean(-1, keepdim=True).sqrt()
        taken_BTD = (found_BTD / size_BT1).to(taken_in).double() * size_BT1
        errors.append(tuple(float((each - exact_BTD).norm() / dynamic_BTD.norm()) for each in (found_BTD, taken_BTD)))  # type: ignore[arg-type]
        return hidden_BTD

    stream.read = read  # type: ignore[method-assign]


def gradients(pipeline: Pipeline) -> Gradients:
    """Return all gradients in fp64."""
    named = (pair for stage in pipeline.stages for pair in stage.named_parameters())
    return {name: parameter.grad.double() for name, parameter in named if parameter.grad is not None}


def relative(found: Gradients, exact: Gradients, constrained: set[str]) -> float:
    """Return the error of some gradients, taken together, as a share of their norm."""
    lost = sum(float((found[name] - exact[name]).norm()) ** 2 for name in constrained)
    return math.sqrt(lost / sum(float(exact[name].norm()) ** 2 for name in constrained))


def run(config: RunConfig, dtype: Dtype, batch_BT1: Tensor) -> tuple[float, Gradients, Errors, set[str]]:
    """Return loss, gradients, errors of the reads in their order, and the names of what holds coordinates."""
    wire: Dtype = "fp64" if dtype == "fp64" else "fp32"
    train, codec = replace(config.train, dtype=dtype), replace(config.codec, dtype=wire)
    pipeline = build_pipeline(replace(config, train=train, codec=codec), torch.device("cpu"))
    errors: Errors = []
    for stage in pipeline.stages:
        assert isinstance(stage.stream, SubspaceStream), "this is about the subspace codec"
        watch_reads(stage.stream, errors, dtype)
    loss = pipeline.step(batch_BT1, 0, 0)
    return loss, gradients(pipeline), errors, {name for stage in pipeline.stages for name in stage.axes}


def main() -> None:
    words = sys.argv[1:] if "--config" in sys.argv else ["--config", "small", *sys.argv[1:]]
    config = parse_train([*words, "--run", "unused"]).config
    torch.set_num_threads(1)
    data = open_data(config.data, config.model, config.seed)
    batch_BT1 = torch.from_numpy(data.train.batch(0, config.microbatch))
    exact_loss, exact, _, constrained = run(config, "fp64", batch_BT1)
    table = Table(title=f"D={config.model.width}, K={config.codec.rank}, {config.model.layers} layers, at the start")  # type: ignore[attr-defined]
    for column in ("train.dtype", "first read", "first matrix", "last read", "loss", "gradients of coordinates", "all gradients"):
        table.add_column(column, justify="right")
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    for dtype in dtypes:
        loss, found, errors, _ = run(config, dtype, batch_BT1)
        shares = relative(found, exact, constrained), relative(found, exact, set(exact))
        table.add_row(dtype, *(f"{value:.2g}" for value in (*errors[0], errors[-1][0], abs(loss / exact_loss - 1), *shares)))
    Console().print(table)


if __name__ == "__main__":
    main()
