"""Evaluate a run's newest checkpoint: `thinwire eval runs/first`. Boundaries are packed and rounded as in training.

In one process, or through one worker per stage over links (`--pipeline.mode workers`). With --tasks the exported model is handed to the
LM Evaluation Harness instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from thinwire.cluster.membership import Membership
from thinwire.cluster.supervisor import Say, run_workers
from thinwire.config.mistakes import refuse_expanded
from thinwire.config.sections import DataConfig, Device, RunConfig
from thinwire.data.open import Data, open_data
from thinwire.pipeline import forms
from thinwire.pipeline.backend import close_group
from thinwire.pipeline.device import choose_device
from thinwire.pipeline.inprocess import build_pipeline
from thinwire.pipeline.worker import WorkerPipeline
from thinwire.run.saved import (
    TOKENIZER_FILE,
    Mode,
    for_use,
    load_here,
    load_together,
    read_settings,
    refuse_other_tokenizer,
)
from thinwire.run.stop import Stop


@dataclass(frozen=True, kw_only=True)
class EvalCommand:
    """Measure loss, perplexity and bits per byte of a run's newest checkpoint."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder that `thinwire train` wrote."""
    source: Annotated[str | None, tyro.conf.arg(name="data.source")] = None
    """Another source than the run's own; the tokenizer stays the run's."""
    sequences: int = 1024
    """Most sequences to evaluate, evenly spaced over the validation part of the source."""
    mode: Annotated[Mode, tyro.conf.arg(name="pipeline.mode")] = "inprocess"
    """All stages in this process, or one worker process per stage."""
    profile: Annotated[str, tyro.conf.arg(name="link.profile")] = "open"
    """Link profile to emulate between workers."""
    device: Device = "auto"
    """Where to compute."""
    tasks: tuple[str, ...] = ()
    """Tasks of the LM Evaluation Harness (package lm_eval) to run on the exported model instead, such as lambada_openai."""
    limit: int | None = None
    """With --tasks: most examples per task."""


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


def evaluate(command: EvalCommand) -> dict[str, Any]:
    """Load the newest checkpoint and measure it."""
    if command.sequences < 1:
        raise ValueError(f"sequences is {command.sequences}; choose 1 or more")
    config = for_use(read_settings(command.run), command.mode, command.profile, command.device)
    config = replace(config, data=_source(config.data, command))
    if command.mode == "workers":
        arguments = {"run": str(command.run), "sequences": command.sequences}
        return run_workers(measure, config, arguments, lambda worker_id, message: None, graceful=False)[0]
    pipeline = build_pipeline(config, choose_device(config.device))
    step = load_here(command.run, pipeline.stages)
    data = open_data(config.data, config.model, config.seed)
    windows = validation_batch(data, command.sequences, pipeline.microbatch)
    return figures(step, pipeline.evaluate(windows, len(windows), step), data.bytes_per_token)


def measure(member: Membership, say: Say, stop: Stop, run: str, sequences: int) -> dict[str, Any]:
    """Be the worker of a stage in an evaluation; only stage 0 opens the data."""
    config: RunConfig = member.config
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    neighbours = member.neighbours("eval")
    try:
        pipeline = WorkerPipeline(config, member.stage, neighbours, choose_device(config.device))
        step = load_together(Path(run), pipeline.stages[0], pipeline.control)
        windows: Tensor | None = None
        facts: dict[str, Any] | None = None
        if member.stage == 0:
            data = open_data(config.data, config.model, config.seed)
            windows = validation_batch(data, sequences, pipeline.microbatch)
            facts = {"rows": len(windows), "bytes_per_token": data.bytes_per_token}
        facts = pipeline.announce(facts, forms.ABOUT_ROWS)
        return figures(step, pipeline.evaluate(windows, facts["rows"], step), facts["bytes_per_token"])
    finally:
        close_group()
        neighbours.close()


def figures(step: int, loss: float, bytes_per_token: float | None) -> dict[str, Any]:
    """Say a loss in the usual units."""
    per_byte = loss / math.log(2) / bytes_per_token if bytes_per_token else None
    return {"step": step, "loss": loss, "perplexity": math.exp(loss), "bits_per_byte": per_byte}


def _source(data: DataConfig, command: EvalCommand) -> DataConfig:
    """Return what to read: the run's own source or another one, through the run's own tokenizer where it has one."""
    refuse_other_tokenizer(command.run, data)
    tokenizer = command.run / TOKENIZER_FILE
    return replace(
        data,
        source=data.source if command.source is None else command.source,
        tokenizer=str(tokenizer) if tokenizer.is_file() else data.tokenizer,
    )


def main(argv: list[str]) -> None:
    """Run the `eval` verb."""
    refuse_expanded(argv, ("data.source",), positional=int(bool(argv) and argv[0].startswith("--")))
    command = tyro.cli(EvalCommand, prog="thinwire eval", args=argv, use_underscores=True)
    results: Mapping[str, Any]
    if command.tasks:
        from thinwire.hf.harness import run_tasks  # not at the top: it exports, which evaluates

        results = run_tasks(command.run, command.tasks, command.limit, command.device)
    else:
        results = evaluate(command)
    print(json.dumps(results, indent=1))
