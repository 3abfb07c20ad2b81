"""Lay examples out in windows of T + 1 marked ids: one each, filled up, or as many as fit where a token separates them.

Too long ones are cut at their end, and left out if nothing that counts remains. What each holds is `completions.py`'s affair.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.data.batches import Windows
from thinwire.data.completions import START


class Examples(Windows):
    """Hand out windows of examples; every one has a token that counts."""

    marked = True

    def __init__(self, tokens_N: np.ndarray, context: int, name: str, *, fill: int, packed: bool) -> None:
        """Lay out what `Completions.encode` made; `fill` is the id behind the last example of a window."""
        starts = np.flatnonzero(tokens_N == START) + 1
        ends = np.append(starts[1:] - 1, len(tokens_N))[: len(starts)]
        targets = np.append(np.flatnonzero(tokens_N >= 0), np.iinfo(np.int64).max)
        used = targets[np.searchsorted(targets, starts)] < np.minimum(ends, starts + context + 1)
        if not used.any():
            raise ValueError(
                f"{name}: none of {len(starts)} examples has an answer within {context + 1} tokens: give more rows or raise --model.context"
            )
        self.tokens_N, self.context, self.fill = tokens_N, context, fill
        self.left_out = int((~used).sum())
        self.starts, self.ends = starts[used], np.minimum(ends, starts + context + 1)[used]
        self.cut = int((self.ends < ends[used]).sum())
        self.firsts = self._packed() if packed else np.arange(len(self.starts) + 1)
        """The first example of each window, and how many there are."""
        self.count = len(self.firsts) - 1

    @property
    def tokens(self) -> int:
        return int((self.ends - self.starts).sum())

    def described(self) -> dict[str, Any]:
        """Return what to tell people."""
        return {"examples": len(self.starts), "windows": len(self), "cut": self.cut, "left_out": self.left_out}

    def _packed(self) -> np.ndarray:
        """Put as many examples into each window as fit, in their order."""
        firsts, room = [], -1
        for index, length in enumerate((self.ends - self.starts).tolist()):
            if length > room:
                firsts.append(index)
                room = self.context + 1
            room -= length
        return np.array([*firsts, len(self.starts)])

    def read(self, position: int) -> np.ndarray:
        """Return window `position`, marked ids, int64 of T+1."""
        window = np.full(self.context + 1, ~self.fill, dtype=np.int64)
        done = 0
        for start, end in zip(*(each[self.firsts[position] : self.firsts[position + 1]] for each in (self.starts, self.ends)), strict=True):
            window[done : done + end - start] = self.tokens_N[start:end]
            done += end - start
        return window
