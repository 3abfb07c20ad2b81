"""The grid of bench/scaling.py: which trainings there are, what each is worth and costs, and with which settings it runs.

All are Llamas of 8 layers in 4 stages, vocabulary 1,024, 128 tokens per sequence, 2,048 tokens per step, rate 0.003, no hashed pairs (with
them the last stage alone nearly reaches dense on these texts, docs/log.md). A compression of C leaves 16 D / C bits per token in each
direction, ids not counted: every stage reads the data.

    quantised   4 bits and a scale of 16 bits per token: K = (16 D / C - 16) / 4 values; K values in bf16 where that is more than none
    entropy     1.28 bits per value, and no more values than D/4
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from thinwire.api import Config
from thinwire.codecs.build import make_codec
from thinwire.config.sections import RunConfig
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stages

LAYERS, STAGES, VOCABULARY, CONTEXT, BATCH = 8, 4, 1024, 128, 16
STEP_TOKENS = BATCH * CONTEXT
WIDTHS = {64: (300, 1200, 4900), 128: (300, 1200, 18000), 256: (300, 1200), 512: (300, 1200)}
"""Steps at each width: at 64 and 128 up to 20 tokens for each parameter."""
COMPRESSIONS = (16, 32, 64, 100, 200)
EVERY_COMPRESSION = (64, 256)
"""Widths with all of them; the others have 32 and 100."""
METHODS = ("subspace", "anchored", "entropy")
"""Those that come in every compression."""
SEEDS = (0, 1, 2)
CLOSE = 0.01
"""A gap to dense below which all seeds are run."""
RATE, QUANTISED_BITS, SCALE_BITS = 1.28, 4, 16
CORPORA = ("stdlib", "prose")
VALUES = {"dense": 8.0, "nothing": 4.0, "dense4": 2.0, "subspace": 1.5, "anchored": 1.5, "entropy": 2.0}
"""What a row is worth: without a dense one no other says anything."""


@dataclass(frozen=True, order=True)
class Job:
    """One training."""

    width: int
    steps: int
    method: str
    """dense, dense4 (4 bits), nothing, or one of METHODS."""
    compression: int
    """0 where there is no choice."""
    corpus: str
    seed: int

    @property
    def name(self) -> str:
        times = f"-{self.compression}x" if self.compression else ""
        return f"{self.method}{times}-d{self.width}-{self.steps}-{self.corpus}-{self.seed}"

    @property
    def dense(self) -> Job:
        """Return the training that this one is measured against."""
        return replace(self, method="dense", compression=0)

    @property
    def worth(self) -> float:
        """Return value per cost; the first seed, the first corpus and the compressions of all widths come first."""
        value = VALUES[self.method] * (0.15 if self.seed else 1) * (0.5 if self.corpus != CORPORA[0] else 1)
        value *= 1.0 if self.compression in (0, 32, 100) else 0.7
        # Steps of narrow networks take nearly as long as those twice as wide: most of it is not arithmetic.
        return value / (self.steps * (128 + self.width) ** 2)


def settings(job: Job) -> dict[str, Any] | None:
    """Return the codec's options; None: so few bits cannot be had in this way."""
    if job.method in ("dense", "nothing", "dense4"):
        options: dict[str, Any] = {"codec.name": "dense" if job.method == "dense4" else job.method}
        return options | ({"codec.bits": QUANTISED_BITS} if job.method == "dense4" else anchors(job))
    bits = 16 * job.width / job.compression
    if job.method == "entropy":
        rank = max(1, min(round(bits / RATE), job.width // 4))
        options = {"codec.name": "anchored", "codec.rank": rank, "codec.entropy": True, "codec.rate": round(bits / rank, 4)}
        return options | anchors(job)
    quantised, plain = int((bits - SCALE_BITS) // QUANTISED_BITS), int(bits // 16)
    if max(quantised, plain) < 1:
        return None
    options = {"codec.name": job.method, "codec.rank": max(quantised, plain)}
    return options | ({"codec.bits": QUANTISED_BITS} if quantised > plain else {}) | anchors(job)


def anchors(job: Job) -> dict[str, Any]:
    """Return the options of anchors where there are any: alike for the control and what it is a control of."""
    known = job.method in ("nothing", "anchored", "entropy")
    return {"codec.anchors": "factorised", "codec.anchor_rank": job.width // 8} if known else {}


def config_of(job: Job, source: str) -> RunConfig:
    """Return the settings of a training, with the FFN that makes its trainable parameters those of dense."""
    options = settings(job)
    assert options is not None, job.name
    plain = shape(job.width, job.width * 11 // 4) | options
    wanted = count_parameters(Config.load("small", shape(job.width, job.width * 11 // 4) | {"codec.name": "dense"}))
    ffn = job.width * 11 // 4 if job.method in ("dense", "dense4") else equal_ffn(Config.load("small", plain), wanted)
    return Config.load("small", plain | {"model.ffn": ffn, "seed": job.seed, "train.steps": job.steps, "data.source": source})


def shape(width: int, ffn: int) -> dict[str, Any]:
    """Return what all trainings of a width have in common."""
    return {
        "model.vocabulary": VOCABULARY,
        "model.width": width,
        "model.layers": LAYERS,
        "model.ffn": ffn,
        "model.context": CONTEXT,
        "train.batch": BATCH,
        "train.warmup": 50,
        "train.validate_every": 0,
        "train.checkpoint_every": 0,
        "train.threads": 1,
        "pipeline.stages": STAGES,
        "pipeline.microbatches": 1,
        "pipeline.mode": "inprocess",
        "data.everywhere": True,
    }


def equal_ffn(config: RunConfig, wanted: int) -> int:
    """Return the width of the FFN with which the trainable parameters come nearest to a number: they grow evenly with it."""
    narrow, wide = (count_parameters(replace(config, model=replace(config.model, ffn=ffn))) for ffn in (8, 16))
    return max(1, 8 + round((wanted - narrow) / ((wide - narrow) / 8)))


@cache
def count_parameters(config: RunConfig) -> int:
    """Count what the optimizers of all stages train."""
    codec = make_codec(config.codec, config.model, seed=config.seed)
    stages = build_stages(config.model, cut_layers(config.model.layers, config.pipeline.stages), codec, config.seed)
    return sum(parameter.numel() for stage in stages for parameter in stage.trained().values())


def all_jobs() -> Iterator[Job]:
    """List every training with the first seed."""
    for width, levels in WIDTHS.items():
        compressions = COMPRESSIONS if width in EVERY_COMPRESSION else (32, 100)
        for corpus in CORPORA if width == 256 else CORPORA[:1]:
            for steps in levels if corpus == CORPORA[0] else levels[:1]:
                yield from (Job(width, steps, method, 0, corpus, 0) for method in ("dense", "dense4", "nothing"))
                listed = (Job(width, steps, method, times, corpus, 0) for method in METHODS for times in compressions)
                yield from (job for job in listed if settings(job) is not None)


def missing_jobs(losses: dict[Job, float], corpora: tuple[str, ...]) -> list[Job]:
    """List what is to do, the most worth for its cost first: with all seeds where the first one came close to dense."""
    wanted = set()
    for job in all_jobs():
        wanted.add(job)
        if job in losses and job.dense in losses and losses[job] / losses[job.dense] - 1 < CLOSE and job.method != "dense":
            wanted |= {replace(each, seed=seed) for each in (job, job.dense) for seed in SEEDS}
    return sorted((job for job in wanted if job not in losses and job.corpus in corpora), key=lambda job: (-job.worth, job))
