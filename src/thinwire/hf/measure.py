"""Validation losses of weights on the disk: through a run's boundaries, and of the plain network without any."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from thinwire.config.sections import RunConfig
from thinwire.data.open import open_data
from thinwire.pipeline import by_stage as staged
from thinwire.run.evaluate import validation_batch
from thinwire.run.saved import TOKENIZER_FILE, refuse_other_tokenizer


@dataclass(frozen=True)
class Losses:
    """What was measured, or why nothing was."""

    sequences: int = 0
    trained: float | None = None
    """Through the boundaries, rounded as in training."""
    plain: float | None = None
    """Without any boundary; None also for a network that has parts in its boundaries."""
    why_not: str | None = None

    def describe(self, boundaries: str = "the boundaries as trained") -> str:
        """Say it in one line."""
        if self.trained is None:
            return f"validation loss not measured: {self.why_not}"
        plain = "" if self.plain is None else f", {self.plain:.4f} without any boundary (the plain network)"
        return f"validation loss {self.trained:.4f} through {boundaries}{plain}; {self.sequences} sequences"


def validation_windows(config: RunConfig, run: Path, sequences: int) -> Tensor:
    """Return validation sequences of the run's own source, read through the tokenizer in its folder."""
    data = config.data
    refuse_other_tokenizer(run, data)
    if (run / TOKENIZER_FILE).is_file() and not data.marked:  # a chat template lies beside the tokenizer that was named
        data = replace(data, tokenizer=str(run / TOKENIZER_FILE))
    microbatch = config.microbatch
    return validation_batch(open_data(data, config.model, config.seed), sequences, microbatch)


def measure_losses(config: RunConfig, windows_NT1: Tensor, fill: staged.Fill, *, step: int, plain: bool) -> Losses:
    """Measure both losses, one stage in memory at a time."""
    trained = staged.evaluate_by_stage(config, windows_NT1, fill, step=step)
    without = staged.evaluate_by_stage(config, windows_NT1, fill, step=step, boundaries=False) if plain else None
    return Losses(len(windows_NT1), trained, without)


def measure_run(config: RunConfig, run: Path, fill: staged.Fill, *, step: int, plain: bool, sequences: int | None) -> Losses:
    """Measure a run's checkpoint on the run's own validation text, if that can be had here."""
    wanted = config.train.validation_sequences if sequences is None else sequences
    if wanted < 0:
        raise ValueError(f"--sequences is {wanted}; give 0 to measure nothing, or a number of validation sequences")
    if wanted == 0:
        return Losses(why_not="--sequences 0 was given")
    try:
        windows_NT1 = validation_windows(config, run, wanted)
    except (ValueError, OSError) as error:
        return Losses(why_not=f"the run's text cannot be opened here ({error})")
    print(f"thinwire: measuring the validation loss on {len(windows_NT1)} sequences; --sequences 0 leaves it out", file=sys.stderr)
    return measure_losses(config, windows_NT1, fill, step=step, plain=plain)
