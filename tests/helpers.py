"""Small models and pipelines for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import DTYPES
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stages
from thinwire.pipeline.inprocess import Pipeline
from thinwire.testing.laws import TINY

MICROBATCH = 2


def make_pipeline(
    codec: str, model: ModelConfig = TINY, stages: int = 2, split: str | None = None, dtype: str = "fp64", **options
) -> Pipeline:
    """Build an in-process pipeline; boundaries and compute use `dtype`."""
    built = make_codec(codec_defaults(codec, dtype=dtype, **options), model, seed=3, compute=DTYPES[dtype])
    return Pipeline(build_stages(model, cut_layers(model.layers, stages, split), built, 3), built, MICROBATCH, model.context)


def random_ids(model: ModelConfig = TINY, batch: int = 4, seed: int = 0) -> Tensor:
    """Return ids [B, T+1] that follow a learnable pattern with some noise."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, model.vocabulary, (batch, 1), generator=generator)
    steps = torch.arange(model.context + 1) * torch.randint(1, 4, (batch, 1), generator=generator)
    return (start + steps) % model.vocabulary


def gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    """Collect every gradient by global name."""
    return {name: p.grad for stage in pipeline.stages for name, p in stage.named_parameters() if p.grad is not None}


def parameters(pipeline: Pipeline) -> dict[str, Tensor]:
    """Collect every parameter by global name."""
    return {name: p for stage in pipeline.stages for name, p in stage.named_parameters()}


def relative(first: Tensor, second: Tensor) -> float:
    """Return |first - second| / |second|."""
    return float((first - second).detach().norm() / second.detach().norm())
