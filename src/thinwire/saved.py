"""The run folder that a training has left: its settings, its tokenizer, its newest checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from thinwire import checkpoint
from thinwire.config import Device, ReplicasConfig, RunConfig
from thinwire.configfile import CONFIG_FILE, read
from thinwire.data.tokenize import load_tokenizer
from thinwire.limits import check
from thinwire.model.stages import Stage
from thinwire.pipeline import forms
from thinwire.pipeline.control import Control
from thinwire.runfolder import TOKENIZER_FILE

Mode = Literal["inprocess", "workers"]


def read_settings(run: Path) -> RunConfig:
    """Return the settings of a run."""
    if (run / "config.json").is_file() and not (run / CONFIG_FILE).is_file():
        raise ValueError(
            f"{run} is a Hugging Face folder, not a run folder; load it with transformers, "
            f"or make a run of it: thinwire import {run} --run DIR"
        )
    if not (run / CONFIG_FILE).is_file():
        raise ValueError(f"{run} is not a run folder: it has no {CONFIG_FILE}; give the folder that `thinwire train --run` wrote")
    return read(run / CONFIG_FILE)


def for_use(config: RunConfig, mode: Mode, profile: str, device: Device) -> RunConfig:
    """Return the settings with what a verb that uses a finished run chooses for itself, checked."""
    # One copy is enough to use a model: the first one's checkpoints stand in the run folder itself.
    config = replace(config, train=replace(config.train, batch=config.replica_batch), replicas=ReplicasConfig())
    config = replace(config, device=device, pipeline=replace(config.pipeline, mode=mode), link=replace(config.link, profile=profile))
    check(config)
    return config


def read_tokenizer(run: Path, other: str | None = None) -> Tokenizer:
    """Return a run's tokenizer, or another one that is named."""
    if other is None and not (run / TOKENIZER_FILE).is_file():
        raise ValueError(
            f"{run} has no {TOKENIZER_FILE}: its data were token shards; name the tokenizer they were made with, --data.tokenizer FILE"
        )
    return load_tokenizer(str(run / TOKENIZER_FILE) if other is None else other)


def load_here(run: Path, stages: list[Stage]) -> int:
    """Load the newest checkpoint of which all stages are in this folder; return its step."""
    return checkpoint.load(checkpoint.newest(run, len(stages)), stages, None, {}).step


def load_together(run: Path, stage: Stage, control: Control) -> int:
    """Load this stage's part of the newest checkpoint that every stage has, on whichever machine; return its step."""
    mine = checkpoint.available(run, [stage.plan])
    everyone = [part["checkpoints"] for part in control.gather({"checkpoints": mine}, forms.HELD)]
    step = checkpoint.load(checkpoint.common(run, everyone, stage.plan.count), [stage], None, {}).step
    basis = stage.stream.fingerprint()
    if control.announce({"basis": basis} if stage.plan.first else None, forms.BASIS)["basis"] != basis:
        raise ValueError(f"stage {stage.plan.index} of {run} is in another basis than stage 0; copy the parts of one run together")
    return step
