"""Tiny stages that run under plans of all kinds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from helpers import TINY, random_ids
from thinwire.codecs.build import codec_defaults
from thinwire.config.sections import PipelineConfig, RunConfig, TrainConfig
from thinwire.memory.blocks import Bandwidth, Choice, Profile, floor_bytes
from thinwire.memory.execute import Executor
from thinwire.memory.measure import make_profile
from thinwire.memory.offload import OffloadThread, slow_bytes
from thinwire.memory.slow_memory import FileMemory
from thinwire.model.cut import cut_layers
from thinwire.model.ends import Context
from thinwire.model.stage import Stage, build_stage
from thinwire.pipeline.inprocess import build_codec

FAST = Bandwidth(1e9, 1e9, duplex=False)
PLANS: dict[str, tuple[Choice, ...]] = {
    "all keep": ("keep",) * 4,
    "all offload": ("offload",) * 4,
    "all recompute": ("recompute",) * 4,
    "usual": ("offload", "recompute", "keep", "keep"),
    "mixed": ("recompute", "offload", "keep", "offload"),
    "mixed again": ("offload", "keep", "recompute", "offload"),
}
EVERY_PLAN = list(itertools.product(("keep", "recompute", "offload"), repeat=4))


def tiny(
    codec: str = "dense", dropout: float = 0.0, dtype: str = "fp32", microbatches: int = 2, options: dict | None = None, **model
) -> RunConfig:
    """Make the settings of a pipeline of two stages: three layers and the head on the last one."""
    return RunConfig(
        seed=3,
        model=replace(TINY, **{"dropout": dropout, "free_layers": 2 if codec == "subspace" else None, **model}),
        train=TrainConfig(batch=2 * microbatches, dtype=dtype),  # type: ignore[arg-type]
        pipeline=PipelineConfig(stages=2, split="1,3", microbatches=microbatches, mode="inprocess"),
        codec=codec_defaults(codec, **(options or {})),
    )


class Limited:
    """The last stage of a tiny pipeline, run alone."""

    def __init__(self, config: RunConfig, index: int = 1) -> None:
        self.config, self.codec = config, build_codec(config)
        ranges = cut_layers(config.model.layers, 2, config.pipeline.split)
        self.stage: Stage = build_stage(config.model, ranges, index, self.codec, config.seed)
        self.profile: Profile = make_profile(self.stage, self.codec, config, FAST)

    def obey(
        self, choices: Sequence[Choice], folder: Path, in_flight: int = 1, microbatches: int = 1, room: float | None = None
    ) -> Executor:
        """Let the stage follow a plan, in as little room as it can do with."""
        blocks = self.profile.blocks
        size = slow_bytes(blocks, choices, in_flight)
        room = floor_bytes(blocks, choices, in_flight) if room is None else room
        offload = OffloadThread(blocks, choices, room, in_flight, FileMemory(folder, size) if size else None)
        self.stage.runner = Executor(self.stage, offload, microbatches)
        return self.stage.runner

    def forward(self, number: int) -> Tensor:
        """Return the loss of a microbatch."""
        ids = random_ids(self.config.model, 2, seed=number)
        generator = torch.Generator().manual_seed(number)
        specs = self.codec.spec(2, self.config.model.context).tensors
        payload = tuple(torch.randn(spec.shape, generator=generator).to(spec.dtype).requires_grad_() for spec in specs)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.train.dtype == "bf16"):
            (loss,) = self.stage(ids, payload, Context(5, torch.arange(2) + 2 * number))
        return loss

    def gradients(self, order: str = "FB") -> dict[str, Tensor]:
        """Run microbatches in an order of forwards and backwards, the oldest backward first; return all gradients."""
        self.stage.zero_grad(set_to_none=True)
        if isinstance(self.stage.runner, Executor):
            self.stage.runner.begin()
        losses: list[Tensor] = []
        number = 0
        for turn in order:
            if turn == "F":
                losses.append(self.forward(number))
                number += 1
            else:
                losses.pop(0).backward()
        return {name: parameter.grad for name, parameter in self.stage.named_parameters() if parameter.grad is not None}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Tell whether all gradients are equal, bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
