"""The run folder that a training has left: its settings, its tokenizer, its newest checkpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from thinwire import checkpoint
from thinwire.config.sections import DataConfig, Device, ReplicasConfig, RunConfig
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.data.tokenize import load_tokenizer
from thinwire.model.stage import Stage
from thinwire.pipeline import forms
from thinwire.pipeline.control import Control
from thinwire.run.check import check
from thinwire.run.folder import TOKENIZER_FILE

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
    return read_config(run / CONFIG_FILE)


def for_use(config: RunConfig, mode: Mode, profile: str, device: Device) -> RunConfig:
    """Return the settings with what a verb that uses a finished run chooses for itself, checked."""
    # One copy is enough to use a model: the first one's checkpoints stand in the run folder itself.
    config = replace(config, train=replace(config.train, batch=config.replica_batch), replicas=ReplicasConfig())
    config = replace(config, device=device, pipeline=replace(config.pipeline, mode=mode), link=replace(config.link, profile=profile))
    check(config)
    return config


def read_tokenizer(run: Path, other: str | None = None) -> Tokenizer:
    """Return a run's tokenizer, or another one that is named."""
    if other is None:
        refuse_no_tokenizer(run)
    return load_tokenizer(str(run / TOKENIZER_FILE) if other is None else other)


def refuse_no_tokenizer(run: Path) -> None:
    """Raise ValueError unless the run folder has its tokenizer; say where it is."""
    if (run / TOKENIZER_FILE).is_file():
        return
    if is_tokenizer_elsewhere(run):
        raise ValueError(
            f"{run} has no {TOKENIZER_FILE}: stage 0 of this run is on another machine, and gives it to the others when the run is "
            f"finished; copy {TOKENIZER_FILE} from the run folder there"
        )
    raise ValueError(
        f"{run} has no {TOKENIZER_FILE}: its data were token shards; name the tokenizer they were made with, --data.tokenizer FILE"
    )


def is_tokenizer_elsewhere(run: Path) -> bool:
    """Tell whether the run's tokenizer is on another machine: that of stage 0, which alone reads the data."""
    own = any((folder / "stage-0.json").exists() for folder in checkpoint.steps(run))
    return not (run / TOKENIZER_FILE).is_file() and bool(checkpoint.steps(run)) and not own


def refuse_other_tokenizer(run: Path, data: DataConfig) -> None:
    """Raise ValueError where a tokenizer would be trained anew because the run's own is on another machine: its loss would mean nothing."""
    if data.tokenizer == "train" and not data.source.endswith(".bin") and is_tokenizer_elsewhere(run):
        refuse_no_tokenizer(run)


def read_from(config: RunConfig, run: Path, source: str | None = None) -> RunConfig:
    """Return the settings that read the run's own source, or another one, through the run's own tokenizer where it has one."""
    refuse_other_tokenizer(run, config.data)
    tokenizer = run / TOKENIZER_FILE
    data = replace(
        config.data,
        source=config.data.source if source is None else source,
        # a chat template lies beside the tokenizer that was named
        tokenizer=str(tokenizer) if tokenizer.is_file() and not config.data.marked else config.data.tokenizer,
    )
    return replace(config, data=data)


def load_here(run: Path, stages: list[Stage]) -> int:
    """Load the newest checkpoint of which all stages are in this folder; return its step."""
    return checkpoint.load_stages(newest_whole(run, len(stages)), stages, None, {}).step


def newest_whole(run: Path, count: int) -> Path:
    """Return the newest checkpoint of which all stages are in this folder, copies too; say if there are parts of newer ones."""
    newest = checkpoint.newest(run, count)
    newer = checkpoint.steps(run)[-1]
    if checkpoint.step_of(newer) > checkpoint.step_of(newest):
        print(
            f"thinwire: note: this is step {checkpoint.step_of(newest)}; of step {checkpoint.step_of(newer)} not all stages are in {run}",
            file=sys.stderr,
        )
    return newest


def load_together(run: Path, stage: Stage, control: Control) -> int:
    """Load this stage's part of the newest checkpoint that every stage has, on whichever machine; return its step."""
    mine = checkpoint.survey(run, copies=True).available([stage.plan])
    everyone = [part["checkpoints"] for part in control.gather({"checkpoints": mine}, forms.HELD)]
    step = checkpoint.load_stages(checkpoint.common(run, everyone, stage.plan.count), [stage], None, {}).step
    basis = stage.stream.fingerprint()
    if control.announce({"basis": basis} if stage.plan.first else None, forms.BASIS)["basis"] != basis:
        raise ValueError(f"stage {stage.plan.index} of {run} is in another basis than stage 0; copy the parts of one run together")
    return step
