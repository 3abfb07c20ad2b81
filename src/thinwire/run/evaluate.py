"""Evaluate a run's newest checkpoint in this process: boundaries are packed and rounded as in training.

The verb is `cli/evaluate.py`; one worker per stage does the same in `cluster/evaluate.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.bits.targets import add_number, count_targets
from thinwire.config.sections import RunConfig
from thinwire.data.open import Data, open_data
from thinwire.pipeline.inprocess import build_pipeline
from thinwire.run.saved import load_here
from thinwire.util.device import choose_device


def validation_batch(data: Data, sequences: int, microbatch: int) -> Tensor:
    """Return evenly spaced validation sequences, whole microbatches of them."""
    if sequences < 1:
        raise ValueError(f"sequences is {sequences}; choose 1 or more")
    windows = data.validation.evenly(max(sequences, microbatch))
    usable = len(windows) // microbatch * microbatch
    if usable == 0:
        raise ValueError(
            f"the validation split has {len(windows)} sequences, a microbatch takes {microbatch}; "
            "give more text, or raise pipeline.microbatches"
        )
    taken = windows[:usable]
    return torch.from_numpy(add_number(taken, count_targets(taken)) if data.validation.marked else taken)


def evaluate_here(config: RunConfig, run: Path, sequences: int) -> dict[str, Any]:
    """Load the newest checkpoint of a run and measure it with all stages in this process."""
    pipeline = build_pipeline(config, choose_device(config.device))
    step = load_here(run, pipeline.stages)
    data = open_data(config.data, config.model, config.seed)
    windows = validation_batch(data, sequences, pipeline.microbatch)
    return figures(step, pipeline.evaluate(windows, len(windows), step), data.bytes_per_token)


def figures(step: int, loss: float, bytes_per_token: float | None) -> dict[str, Any]:
    """Say a loss in the usual units."""
    per_byte = loss / math.log(2) / bytes_per_token if bytes_per_token else None
    return {"step": step, "loss": loss, "perplexity": math.exp(loss), "bits_per_byte": per_byte}
