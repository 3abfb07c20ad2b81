"""What makes the host wait for the device in a training step: every line of it, counted.

A microbatch may wait once for its ids and once for each tensor of its payload, in each direction; a step twice besides: for the losses of
its microbatches and for the norm of the gradients. What some codecs need beyond that is listed here by its function.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from helpers import TINY, random_ids
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.registry import CODECS
from thinwire.config.sections import TrainConfig
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stages
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import Pipeline

STEPS, STAGES, MICROBATCHES = 3, 3, 2
BOUNDARIES = STAGES - 1
ELSEWHERE = {"step": 1, "squared_norm": STAGES}
"""Functions that wait once per step, or once per step and stage: of one process that has all stages."""
MORE: dict[str, dict[str, int]] = {
    # Both ends learn from what has crossed when a step is committed: codes of both directions, ids for the means and for their own coding.
    "entropy": {"dequantize": 2 * MICROBATCHES * BOUNDARIES, "commit": 2 * 4 * BOUNDARIES},
    # The basis is moved on the host, in fp64.
    "drift": {"grassmann_step": 2, "go_over": 2 * STAGES},
    # Whether the threshold is off.
    "threshold": {"_is_off": BOUNDARIES},
    # A factorisation in fp64, on the host.
    "lowrank": {"dominant_basis": 2 * MICROBATCHES * BOUNDARIES},
    "learned": {"update": 2 * BOUNDARIES},
    # Where a sample's values are stored, for each microbatch at each end, and how many were known.
    "delta": {"commit": 2 * BOUNDARIES * (MICROBATCHES + 1)},
    # Whether a codebook has learnt anything, and which entries are hardly used: 2 levels, both directions, both ends.
    "rvq": {"update": 2 * BOUNDARIES * (1 + 2)},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in CODECS.names()} | {
    "bits": ("subspace", {"bits": 4, "rank": 6}),
    "entropy": ("subspace", {"rank": 6, "entropy": True, "rate": 2.0}),
    "drift": ("subspace", {"rank": 6, "drift_every": 1}),
    "warm-up": ("topk", {"warmup": 2}),
    "learned": ("anchored", {"projector": "learned", "projector_every": 1}),
}


def waits(strict: Any, name: str, options: dict[str, Any]) -> tuple[Counter[str], int]:
    """Train; return how often each function has waited in the steps behind the first, and the tensors of a payload."""
    codec = make_codec(codec_defaults(name, **options), TINY, seed=3)
    stages = [stage.to("strict") for stage in build_stages(TINY, cut_layers(TINY.layers, STAGES, None), codec, 3)]
    pipeline = Pipeline(stages, codec, 2, TINY.context)
    optimizers = [StageOptimizer(stage, TrainConfig()) for stage in stages]
    found: Counter[str] = Counter()
    for step in range(1 + STEPS):
        with strict.watched() as watched:
            pipeline.step(random_ids(batch=2 * MICROBATCHES, seed=step), step, 0)
            for optimizer in optimizers:
                optimizer.squared_norm()
                optimizer.step(1.0, 0.5)
            for optimizer, rotation in zip(optimizers, pipeline.update_shared(step, 1.0), strict=False):
                optimizer.carry_over(rotation)
        if step:
            for (place, _), count in watched.items():
                found[place] += count
    return found, len(codec.at(TINY.layers // 2).spec(2, TINY.context).tensors)


@pytest.mark.parametrize("case", CASES)
def test_every_wait_is_known(strict, case):
    found, tensors = waits(strict, *CASES[case])
    by_function: Counter[str] = Counter()
    for place, count in found.items():
        by_function[place.split()[-1]] += count
    packing = sum(count for function, count in by_function.items() if function.startswith("pack"))
    assert packing <= STEPS * MICROBATCHES * BOUNDARIES * (1 + 2 * tensors), found
    known = ELSEWHERE | MORE.get(case, {})
    for function, count in by_function.items():
        if not function.startswith("pack"):
            assert count <= STEPS * known.get(function, 0), (function, found)
    assert by_function["step"] == STEPS and by_function["squared_norm"] == STEPS * STAGES
    assert packing >= STEPS * MICROBATCHES * BOUNDARIES * 2


def test_a_line_that_waits_in_every_microbatch_is_found(strict, monkeypatch):
    """The test above can fail: a version that is read from the device is a wait for each use."""
    from thinwire.model.subspace.stream import SubspaceStream

    monkeypatch.setattr(SubspaceStream, "on_host", ())
    found, _ = waits(strict, "subspace", {"rank": 6})
    assert sum(count for place, count in found.items() if "subspace/stream.py" in place) >= STEPS * MICROBATCHES * BOUNDARIES
