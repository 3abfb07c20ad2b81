"""Evaluate a run's newest checkpoint through one worker per stage over links: `thinwire eval --pipeline.mode workers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.cluster.membership import Membership
from thinwire.cluster.opening import open_stage
from thinwire.cluster.supervisor import run_workers
from thinwire.cluster.worker_process import Say
from thinwire.config.sections import RunConfig
from thinwire.data.open import open_data
from thinwire.pipeline import forms
from thinwire.pipeline.backend import close_group
from thinwire.pipeline.outcome import EVALUATION, Outcome
from thinwire.run.evaluate import figures, validation_batch
from thinwire.run.saved import load_together
from thinwire.run.stop import Stop


def evaluate_in_workers(config: RunConfig, run: Path, sequences: int) -> dict[str, Any]:
    """Load the newest checkpoint of a run and measure it with one process per stage."""
    arguments = {"run": str(run), "sequences": sequences}
    return run_workers(evaluate_stage, config, arguments, lambda worker_id, message: None, graceful=False)[0]


def evaluate_stage(member: Membership, say: Say, stop: Stop, run: str, sequences: int) -> dict[str, Any]:
    """Be the worker of a stage in an evaluation; only stage 0 opens the data."""
    config: RunConfig = replace(member.config, data=replace(member.config.data, everywhere=False))  # ids cross: one stage has the data
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    neighbours = member.neighbours("eval")
    try:
        opened = open_stage(config, neighbours)
        compute, group = opened.compute, opened.group
        step = load_together(Path(run), compute.stages[0], group)
        windows: Tensor | None = None
        facts: dict[str, Any] | None = None
        if member.stage == 0:
            data = open_data(config.data, config.model, config.seed)
            windows = validation_batch(data, sequences, compute.microbatch)
            facts = {"rows": len(windows), "bytes_per_token": data.bytes_per_token}
        facts = group.announce(facts, forms.ABOUT_ROWS)
        loss = group.settle(Outcome(EVALUATION, compute.evaluate(windows, facts["rows"], step), 0.0)).loss
        assert loss is not None
        return figures(step, loss, facts["bytes_per_token"])
    finally:
        close_group()
        neighbours.close()
