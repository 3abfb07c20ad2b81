"""Several sources in one run, each with a weight: which one a sample comes from is a function of seed and index alone.

Samples come in rounds: in each, every source gives as many as its weight says, in an order of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from thinwire.data.batches import Samples, Windows, permute

LONGEST_ROUND = 4096
"""Most samples of a round; weights that would need more are rounded to this many parts."""
SHORTEST_ROUND = 64


def shares(weights: Sequence[Fraction]) -> list[int]:
    """Return how many samples of a round each source gives: exactly by weight where that takes at most `LONGEST_ROUND`, at least one."""
    parts = [weight / sum(weights) for weight in weights]
    size = lcm(*(part.denominator for part in parts))
    if size <= LONGEST_ROUND:
        size *= max(1, SHORTEST_ROUND // size)
        return [int(part * size) for part in parts]
    return [max(1, round(part * LONGEST_ROUND)) for part in parts]


class Mixture(Samples):
    """Draw from several sources."""

    def __init__(self, parts: Sequence[Samples], weights: Sequence[Fraction], seed: int) -> None:
        self.parts, self.seed, self.shares = parts, seed, shares(weights)
        self.marked = parts[0].marked
        known = [part.epoch * sum(self.shares) // share for part, share in zip(parts, self.shares, strict=True) if part.epoch is not None]
        self.epoch = min(known, default=None)
        tokens = [part.tokens for part in parts if part.tokens is not None]
        self.tokens = sum(tokens) if len(tokens) == len(parts) else None

    def place(self, index: int) -> tuple[int, int]:
        """Return which source a sample comes from, and its index there."""
        turn, position = divmod(index, sum(self.shares))
        position = permute(position, sum(self.shares), f"{self.seed}/mixture/{turn}")
        for number, share in enumerate(self.shares):
            if position < share:
                return number, turn * share + position
            position -= share
        raise AssertionError(index)

    def sample(self, index: int) -> np.ndarray:
        number, position = self.place(index)
        return self.parts[number].sample(position)


class MixedWindows(Windows):
    """Validate with windows of several sources, as many of each as its weight says."""

    def __init__(self, parts: Sequence[Windows], weights: Sequence[Fraction]) -> None:
        self.parts, self.weights, self.marked = parts, weights, parts[0].marked
        self.count = sum(map(len, parts))

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def read(self, position: int) -> np.ndarray:
        for part in self.parts:
            if position < len(part):
                return part.read(position)
            position -= len(part)
        raise AssertionError(position)

    def evenly(self, count: int) -> np.ndarray:
        total, ends, windows = sum(self.weights), 0, []
        reached = Fraction(0)
        for part, weight in zip(self.parts, self.weights, strict=True):
            reached += weight
            wanted = int(count * reached / total) - ends
            ends += wanted
            if wanted:
                windows.append(part.evenly(wanted))
        return np.concatenate(windows) if windows else super().evenly(count)
