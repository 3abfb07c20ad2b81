"""Choose the next token from logits: greedily, or by chance among the likely ones. The same seed gives the same choices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose."""

    temperature: float = 1.0
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among so many of the likeliest tokens; unset: among all."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability; unset: among all."""
    seed: int = 0
    """Seed of the choices."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}; choose 0 (the likeliest token) or more, 1 samples as the model has learnt"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; choose 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; choose a number above 0 and up to 1, or leave it out")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; choose 0 to {2**63 - 1}")


class Sampler:
    """Choose one token after the other."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits_V: Tensor) -> int:
        logits_V = logits_V.detach().cpu().double()
        if not logits_V.isfinite().all():
            raise ValueError("the model's logits are not finite: its training has diverged; choose an earlier checkpoint")
        if self.sampling.temperature == 0:
            return int(logits_V.argmax())
        # Sorted once; the sort is stable, so that equal logits are cut off in the order of their ids.
        sorted_V, ids_V = (logits_V / self.sampling.temperature).sort(descending=True, stable=True)
        if self.sampling.top_k is not None:
            sorted_V = sorted_V[: self.sampling.top_k]
        probability_V = sorted_V.softmax(0)
        if self.sampling.top_p is not None:
            # A token stays while those before it have less than top_p: the likeliest always does.
            probability_V = probability_V[probability_V.cumsum(0) - probability_V < self.sampling.top_p]
        return int(ids_V[torch.multinomial(probability_V, 1, generator=self.generator)])
