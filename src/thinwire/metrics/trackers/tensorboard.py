"""Curves for TensorBoard: event files in RUN/tensorboard, seen with `tensorboard --logdir RUN` (or a folder of runs)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from thinwire.config.sections import RunConfig
from thinwire.config.toml import to_toml
from thinwire.metrics.track import Tracker, scalars

FLUSH_SECONDS = 10
"""How old the curves on a screen may be."""


class TensorBoard(Tracker):
    """Write every number of a step as a scalar, and the settings as a text."""

    def __init__(self, run: Path, config: RunConfig, *, resume: bool) -> None:
        self.run, self.config, self.resume = run, config, resume
        self.writer: SummaryWriter | None = None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.writer = self.writer or self.open(step)
        for name, value in scalars(values).items():
            self.writer.add_scalar(name, value, step)

    def open(self, step: int) -> SummaryWriter:
        """Start an event file; the first step after a resume says which steps of the earlier files no longer count."""
        writer = SummaryWriter(str(self.run / "tensorboard"), purge_step=step if self.resume else None, flush_secs=FLUSH_SECONDS)
        writer.add_text("config", f"```toml\n{to_toml(self.config)}\n```", step)
        return writer

    def close(self) -> None:
        if self.writer:
            self.writer.close()
