"""Evaluate a run's newest checkpoint: `thinwire eval runs/first`. Boundaries are packed and rounded as in training."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from thinwire import checkpoint
from thinwire.config import DataConfig, Device
from thinwire.configfile import CONFIG_FILE, read
from thinwire.data.open import Data, open_data
from thinwire.pipeline.device import choose_device
from thinwire.pipeline.pipeline import build_pipeline

TOKENIZER_FILE = "tokenizer.json"
"""The run's tokenizer, kept in its folder so that the run can be used where its source is not."""


@dataclass(frozen=True, kw_only=True)
class EvalCommand:
    """Measure loss, perplexity and bits per byte of a run's newest checkpoint."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder that `thinwire train` wrote."""
    source: Annotated[str | None, tyro.conf.arg(name="data.source")] = None
    """Another source than the run's own; the tokenizer stays the run's."""
    sequences: int = 1024
    """Most sequences to evaluate, evenly spaced over the validation part of the source."""
    device: Device = "auto"
    """Where to compute."""


def validation_batch(data: Data, sequences: int, microbatch: int) -> Tensor:
    """Return evenly spaced validation sequences, whole microbatches of them."""
    windows = torch.from_numpy(data.validation.evenly(max(sequences, microbatch)))
    usable = len(windows) // microbatch * microbatch
    if usable == 0:
        raise ValueError(
            f"the validation split has {len(windows)} sequences, a microbatch takes {microbatch}; "
            "give more text, or raise pipeline.microbatches"
        )
    return windows[:usable]


def evaluate(command: EvalCommand) -> dict[str, float | int | None]:
    """Load the newest checkpoint and measure it."""
    if not (command.run / CONFIG_FILE).is_file():
        raise ValueError(f"{command.run} is not a run folder: it has no {CONFIG_FILE}; give the folder that `thinwire train --run` wrote")
    config = read(command.run / CONFIG_FILE)
    pipeline = build_pipeline(config, choose_device(command.device))
    newest = checkpoint.newest(command.run, len(pipeline.stages))
    position = checkpoint.load(newest, pipeline.stages, None, {})
    data = open_data(_source(config.data, command), config.model, config.seed)
    windows = validation_batch(data, command.sequences, pipeline.microbatch)
    loss = pipeline.evaluate(windows, len(windows), position.step)
    per_byte = loss / math.log(2) / data.bytes_per_token if data.bytes_per_token else None
    return {"step": position.step, "loss": loss, "perplexity": math.exp(loss), "bits_per_byte": per_byte}


def _source(data: DataConfig, command: EvalCommand) -> DataConfig:
    """Return what to read: the run's own source or another one, through the run's own tokenizer where it has one."""
    tokenizer = command.run / TOKENIZER_FILE
    return replace(
        data,
        source=data.source if command.source is None else command.source,
        tokenizer=str(tokenizer) if tokenizer.is_file() else data.tokenizer,
    )


def main(argv: list[str]) -> None:
    """Run the `eval` verb."""
    command = tyro.cli(EvalCommand, prog="thinwire eval", args=argv, use_underscores=True)
    print(json.dumps(evaluate(command), indent=1))
