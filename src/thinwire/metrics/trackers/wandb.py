"""Curves for Weights & Biases, on its server or, with its own settings, offline: what is sent are numbers, and settings without paths.

The project is the folder of the runs, the run has the name of its folder; its identity is kept there, so that a resume goes on with it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from thinwire.config.sections import RunConfig
from thinwire.config.toml import shared_settings
from thinwire.metrics.track import Tracker, scalars
from thinwire.util.files import write_atomic

IDENTITY = "wandb_id"
"""The file of a run folder with the name that the server knows it by."""


class WeightsAndBiases(Tracker):
    """Log every number of a step; settings go with the first."""

    def __init__(self, run: Path, config: RunConfig, *, resume: bool) -> None:
        self.run, self.config, self.resume = run.resolve(), config, resume
        self.opened: Any = None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.opened = self.opened or self.open()
        self.opened.log(scalars(values), step=step)

    def open(self) -> Any:
        """Begin a run on the server, or go on with the earlier one; steps that are done again stay as they were there."""
        path = self.run / IDENTITY
        known = self.resume and path.is_file()
        identity = path.read_text(encoding="utf-8").strip() if known else uuid.uuid4().hex
        if not known:
            self.run.mkdir(parents=True, exist_ok=True)
            write_atomic(path, identity.encode())
        place = {"project": self.run.parent.name or "thinwire", "name": self.run.name, "dir": str(self.run)}
        return wandb.init(id=identity, resume="allow", config=shared_settings(self.config), **place)

    def close(self) -> None:
        if self.opened is not None:
            self.opened.finish()
