"""Two steps of training with each codec on a device, against the CPU."""

from __future__ import annotations

import dataclasses

import torch

from thinwire.codecs.build import codec_defaults
from thinwire.config.sections import PipelineConfig, RunConfig, TrainConfig
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import build_pipeline
from thinwire.testing.laws import CPU, TINY, demand

BATCH, STEPS = 4, 2
TOLERANCE = 1e-3
"""Relative difference of a loss that another order of sums explains; a codec that chooses values may choose others for it."""


def losses_on(device: torch.device, codec: str) -> list[float]:
    """Train a tiny model of two stages in this process; return the loss of each step."""
    config = RunConfig(
        seed=3,
        model=TINY,
        train=TrainConfig(steps=STEPS, batch=BATCH, warmup=0),
        pipeline=PipelineConfig(stages=2, microbatches=2),
        codec=codec_defaults(codec),
    )
    pipeline = build_pipeline(config, device)
    optimizers = [StageOptimizer(stage, dataclasses.replace(config.train, rate=0.01)) for stage in pipeline.stages]
    losses = []
    for step in range(STEPS):
        ids_BT1 = torch.randint(TINY.vocabulary, (BATCH, TINY.context + 1), generator=torch.Generator().manual_seed(step))
        losses.append(pipeline.step(ids_BT1, step, BATCH * step))
        for optimizer in optimizers:
            optimizer.step(1.0, 1.0)
    return losses


def trains_as_on_the_cpu(codec: str, device: torch.device) -> float:
    """Raise BrokenLaw unless the losses are those of the CPU; return their largest relative difference."""
    expected, found = losses_on(CPU, codec), losses_on(device, codec)
    difference = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    demand(difference <= TOLERANCE, f"losses {found}, on the CPU {expected}")
    demand(len(set(found)) == STEPS, f"the loss does not move: {found}")
    return difference
