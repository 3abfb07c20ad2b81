"""Token ids as bytes, near the entropy of their frequencies: one table for all, learnt by whoever calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from thinwire.bits.entropy import Ints, coder_of, coding, empty_coder, refuse_rest
from thinwire.bits.raw import Buffer

TOTAL = 2**22
"""Sum of a table's frequencies, at least twice as many as there are ids."""
LEARNING = 16
"""What one occurrence adds to the count of an id, which begins with 1."""


def id_table(counts: Ints) -> Any:
    """Make the coder's table of counts: every id can occur."""
    total = max(TOTAL, 1 << (2 * len(counts) - 1).bit_length())
    frequencies = 1 + counts * (total - len(counts)) // counts.sum()
    frequencies[frequencies.argmax()] += total - frequencies.sum()
    return coding().Categorical(frequencies / total, perfect=False)


def encode_ids(ids: Ints, table: Any) -> bytes:
    """Put ids into bytes."""
    coder = empty_coder()
    coder.encode_reverse(ids.ravel().astype(np.int32), table)
    return coder.get_compressed().astype("<u4").tobytes()


def decode_ids(data: Buffer, count: int, table: Any) -> Ints:
    """Take `count` ids out of `encode_ids`'s bytes."""
    coder = coder_of(data)
    ids = coder.decode(table, count).astype(np.int64)
    refuse_rest(coder, f"{count} ids", len(data))
    return ids
