"""Measure a run's newest checkpoint: `thinwire eval runs/first`.

In one process, or through one worker per stage over links (`--pipeline.mode workers`). With --tasks the exported model is handed to the
LM Evaluation Harness instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from thinwire.config.mistakes import refuse_expanded
from thinwire.config.sections import Device
from thinwire.run.saved import Mode


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


def main(argv: list[str]) -> None:
    """Run the `eval` verb."""
    refuse_expanded(argv, ("data.source",), positional=int(bool(argv) and argv[0].startswith("--")))
    command = tyro.cli(EvalCommand, prog="thinwire eval", args=argv, use_underscores=True)
    found: Mapping[str, Any]
    if command.tasks:
        from thinwire.hf.harness import run_tasks  # not at the top: --help answers without it

        found = run_tasks(command.run, command.tasks, command.limit, command.device)
    else:
        from thinwire.api import evaluate

        found = evaluate(
            command.run,
            source=command.source,
            sequences=command.sequences,
            mode=command.mode,
            link=command.profile,
            device=command.device,
        )
    print(json.dumps(found, indent=1))
