"""What variations of a boundary are worth on a toy: characters of Python source, D = 64, 4 layers in 4 stages, 200 steps.

    .venv/bin/python bench/variations.py                   every row, a minute or less each
    .venv/bin/python bench/variations.py rvq boundary      those whose names contain a word
    .venv/bin/python bench/variations.py --data 50000      other windows of the text

One seed and a toy: it tells large effects from none, and needs the row `nothing` beside it. Figures are in docs/log.md.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.sections import ModelConfig, TrainConfig
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stages
from thinwire.optim.optimizers import StageOptimizer, clip_scale
from thinwire.pipeline.inprocess import Pipeline

MODEL = ModelConfig(vocabulary=128, width=64, layers=4, heads=4, kv_heads=2, ffn=128, context=32)
BATCH, STEPS, STAGES, SEED, VALIDATION = 16, 200, 4, 3, 10_000
CODED: dict[str, Any] = {"codec": "anchored", "rank": 16, "entropy": True, "rate": 1.0}
ROWS: dict[str, dict[str, Any]] = {
    "dense": {"codec": "dense"},
    "nothing": {"codec": "nothing"},
    "quantize 2 bits": {"codec": "quantize", "bits": 2},
    "rvq 2 levels": {"codec": "rvq"},
    "rvq 1 level": {"codec": "rvq", "levels": 1},
    "entropy": CODED,
    "entropy dither backward": CODED | {"dither": "backward"},
    "entropy dither both": CODED | {"dither": "both"},
    "entropy steer penalty": CODED | {"steer": "penalty"},
    "entropy boundary_rates 1.3/1/0.7": CODED | {"boundary_rates": "1.3/1/0.7"},
    "entropy boundary_rates 0.7/1/1.3": CODED | {"boundary_rates": "0.7/1/1.3"},
    "entropy boundary_rates 0.4/1/1.6": CODED | {"boundary_rates": "0.4/1/1.6"},
    "entropy 0.8 forward": CODED | {"rate": 0.8, "backward_rate": 1.2},
    "entropy 1.2 forward": CODED | {"rate": 1.2, "backward_rate": 0.8},
    "subspace": {"codec": "subspace", "rank": 8},
    "subspace muon": {"codec": "subspace", "rank": 8, "optimizer": "muon"},
    "dense muon": {"codec": "dense", "optimizer": "muon"},
    "quantize 2 bits, 10 batches": {"codec": "quantize", "bits": 2, "backward_bits": 8, "batches": 10},
    "delta 2 bits, 10 batches": {"codec": "delta", "bits": 2, "batches": 10},
    "dense, 10 batches": {"codec": "dense", "batches": 10},
}


def windows(seed: int) -> torch.Tensor:
    """Return a batch of windows of a text that every Python has."""
    text = torch.tensor([min(byte, 127) for byte in inspect.getsource(argparse).encode()])
    starts = torch.randint(0, len(text) - MODEL.context - 1, (BATCH,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[start : start + MODEL.context + 1] for start in starts])


def train(row: Mapping[str, Any], data: int) -> str:
    """Train one row; return its losses and bytes."""
    options = dict(row)
    name, optimizer, batches = options.pop("codec"), options.pop("optimizer", "shared"), options.pop("batches", STEPS)
    codec = make_codec(codec_defaults(name, dtype="fp32", **options), MODEL, seed=SEED)
    stages = build_stages(MODEL, cut_layers(MODEL.layers, STAGES), codec, SEED)
    pipeline = Pipeline(stages, codec, BATCH, MODEL.context, known_ids=True)
    optimizers = [StageOptimizer(stage, TrainConfig(optimizer=optimizer)) for stage in stages]
    losses = []
    for step in range(STEPS):
        losses.append(pipeline.step(windows(data + step % batches), step, BATCH * step))
        norm = sum(each.squared_norm() for each in optimizers) ** 0.5
        for each in optimizers:
            each.step(min(1.0, 5 * (1 - step / STEPS)), clip_scale(norm, 1.0))
        pipeline.update_shared(step, 1.0)
    validation = sum(pipeline.evaluate(windows(VALIDATION + number)) for number in range(4)) / 4
    meters = pipeline.traffic.boundaries
    sent = sum(meter.forward + meter.backward for meter in meters) / sum(meter.tokens for meter in meters)
    return f"{sent:.1f} bytes/token, training {sum(losses[-20:]) / 20:.3f}, validation {validation:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only rows whose names contain one of these")
    parser.add_argument("--data", type=int, default=0, help="seed of the first batch of windows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, row in ROWS.items():
        if not arguments.words or any(word in name for word in arguments.words):
            print(f"{name}: {train(row, arguments.data)}", flush=True)


if __name__ == "__main__":
    main()
