"""Which tokens of a sequence count in the loss, marked in the ids themselves. Free of torch; the marks in bytes are in `marks.py`.

A marked row is T + 2 numbers: T + 1 ids, of which one that does not count is there as its complement (-1 - id), then how many count in the
whole batch, over all microbatches and replicas: the loss is the mean over these. The first id of a row is never predicted.
"""

from __future__ import annotations

import numpy as np


def mark_ids(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Put the ids that do not count down as their complements."""
    return np.where(counts, ids, ~ids)


def count_targets(marked_BT1: np.ndarray) -> int:
    """Return how many tokens of marked ids count."""
    return int((marked_BT1[:, 1:] >= 0).sum())


def add_number(marked_BT1: np.ndarray, number: int) -> np.ndarray:
    """Put behind each row how many tokens count in the whole batch."""
    return np.concatenate((marked_BT1, np.full((len(marked_BT1), 1), number, marked_BT1.dtype)), axis=1)
