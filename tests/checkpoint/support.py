"""A tiny model after a few steps, and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from helpers import make_pipeline, random_ids
from thinwire import checkpoint
from thinwire.checkpoint import Position
from thinwire.config.sections import TrainConfig
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import Pipeline

FACTS = {"settings": "c", "data": "d", "split": "2,2", "microbatches": 2}


def trained(steps: int = 2, stages: int = 2) -> tuple[Pipeline, list[StageOptimizer]]:
    """Train a model for a few steps."""
    pipeline = make_pipeline("subspace", stages=stages, rank=6, dtype="fp32")
    optimizers = [StageOptimizer(stage, TrainConfig()) for stage in pipeline.stages]
    for step in range(steps):
        pipeline.step(random_ids(seed=step), step, 4 * step)
        for optimizer in optimizers:
            optimizer.step(1.0, 1.0)
    return pipeline, optimizers


def save(run: Path, step: int = 2, steps: int = 2) -> tuple[Pipeline, list[StageOptimizer], Path]:
    """Train and write a checkpoint."""
    pipeline, optimizers = trained(steps)
    return pipeline, optimizers, checkpoint.save(run, pipeline.stages, optimizers, Position(step, 1.5), FACTS)


def change_manifest(path: Path, **changes: object) -> None:
    """Write a manifest anew, with a checksum that is right."""
    path.write_bytes(checkpoint.encode_manifest(json.loads(path.read_text()) | changes))


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
