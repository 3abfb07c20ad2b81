"""Measure a run's newest checkpoint: `thinwire eval runs/first`.

In one process, or through one worker per stage over links (`--pipeline.mode workers`). With --tasks the exported model is handed to the
LM Evaluation Harness instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from thinwire.config.mistakes import refuse_expanded
from thinwire.config.sections import DataConfig, Device
from thinwire.run.saved import TOKENIZER_FILE, Mode, for_use, read_settings, refuse_other_tokenizer


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


def run_evaluation(command: EvalCommand) -> dict[str, Any]:
    """Load the newest checkpoint and measure it; what that takes is imported when it is needed."""
    if command.tasks:
        from thinwire.hf.harness import run_tasks

        return run_tasks(command.run, command.tasks, command.limit, command.device)
    if command.sequences < 1:
        raise ValueError(f"sequences is {command.sequences}; choose 1 or more")
    config = for_use(read_settings(command.run), command.mode, command.profile, command.device)
    config = replace(config, data=_source(config.data, command))
    if command.mode == "workers":
        from thinwire.cluster.evaluate import evaluate_in_workers

        return evaluate_in_workers(config, command.run, command.sequences)
    from thinwire.run.evaluate import evaluate_here

    return evaluate_here(config, command.run, command.sequences)


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
    print(json.dumps(run_evaluation(command), indent=1))
