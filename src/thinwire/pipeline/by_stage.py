"""Evaluate a model one stage at a time: peak memory is one stage and what crosses one boundary.

For models that are larger than this machine's memory, at rest: no workers, no gradients. The pipeline that holds all stages at once is
`pipeline.py`; with boundaries both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs.base import CastEntry, CastExit
from thinwire.config.sections import RunConfig
from thinwire.model.cut import cut_layers
from thinwire.model.ends import Context
from thinwire.model.stage import Stage, TiedHead, build_stage
from thinwire.pipeline.boundary import Boundary
from thinwire.pipeline.inprocess import build_codec

Fill = Callable[[Stage], None]
"""Puts the weights of a stage in place."""


@torch.no_grad()
def evaluate_by_stage(config: RunConfig, windows_NT1: Tensor, fill: Fill, *, step: int, boundaries: bool = True) -> float:
    """Return the mean loss after so many steps, through the run's boundaries or, without them, of the plain network."""
    codec = build_codec(config)
    ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    microbatch = config.microbatch
    rows = [slice(start, start + microbatch) for start in range(0, len(windows_NT1), microbatch)]
    samples_N = torch.arange(len(windows_NT1))
    payloads: list[tuple[Tensor, ...]] = [()] * len(rows)
    embedding_VD: Tensor | None = None
    for index in range(len(ranges)):
        stage = build_stage(config.model, ranges, index, codec, config.seed, config.adapter)
        fill(stage)
        if config.model.tied_head:
            embedding_VD = stage.embedding.weight if stage.plan.first else embedding_VD
            if stage.plan.last:
                assert embedding_VD is not None
                stage.head = TiedHead(embedding_VD)
        if not boundaries:
            leave_ends_out(stage, codec.compute)
        boundary = None
        if boundaries and not stage.plan.last:
            assert stage.exit is not None  # both ends know the same: one is enough
            boundary = Boundary(codec.at(stage.plan.layers.stop), microbatch, config.model.context, (stage.exit, stage.exit))
        for number, part in enumerate(rows):
            context = Context(step, samples_N[part], training=False, rows=len(windows_NT1) if config.data.marked else None)
            with torch.autocast("cpu", torch.bfloat16, enabled=config.train.dtype == "bf16"):
                payloads[number] = stage(windows_NT1[part], payloads[number], context)
            if boundary is not None:
                payloads[number] = cross(boundary, payloads[number])
        del stage
    return sum(float(loss) * len(windows_NT1[part]) / len(windows_NT1) for (loss,), part in zip(payloads, rows, strict=True))


def cross(boundary: Boundary, payload: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a payload as it arrives: packed into bytes and unpacked."""
    return boundary.unpack(boundary.pack(payload, "forward", 0), "forward", 0)


def leave_ends_out(stage: Stage, compute: torch.dtype) -> None:
    """Hand the stream on as it is: right only where a stage's ends hold nothing of the network."""
    for layer in stage.entries:
        stage.entries[layer] = CastEntry(compute)
    for layer in stage.exits:
        stage.exits[layer] = CastExit(compute)
