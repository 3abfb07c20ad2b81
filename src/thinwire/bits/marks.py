"""Marked ids (`targets.py`) as tensors, and their marks as bytes: a bit for each of the T predicted tokens of a row, then the number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.bits.raw import Buffer
from thinwire.bits.targets import add_number, mark_ids
from thinwire.config.limits import LARGEST_MARKED

NUMBER_BYTES = 4


def plain_ids(marked: Tensor) -> Tensor:
    """Return the ids, whether they count or not."""
    return torch.where(marked < 0, -1 - marked, marked)


def marks_size(batch: int, time: int) -> int:
    """Return the bytes of the marks of so many rows."""
    return (batch * time + 7) // 8 + NUMBER_BYTES


def pack_marks(marked_BT2: Tensor) -> bytes:
    """Put the marks of some rows into bytes."""
    counts_BT = marked_BT2[:, 1:-1].cpu().numpy() >= 0
    return np.packbits(counts_BT).tobytes() + int(marked_BT2[0, -1]).to_bytes(NUMBER_BYTES, "little")


def unpack_marks(data: Buffer, ids_BT1: Tensor) -> Tensor:
    """Mark the ids of some rows with `pack_marks`'s bytes; refuse a number that the rows themselves contradict."""
    batch, time = ids_BT1.shape[0], ids_BT1.shape[1] - 1
    if len(data) != marks_size(batch, time):
        raise ValueError(f"marks of {len(data)} bytes where {marks_size(batch, time)} were declared for {batch} rows of {time} tokens")
    bits, number = np.frombuffer(data, np.uint8)[:-NUMBER_BYTES], int.from_bytes(data[-NUMBER_BYTES:], "little")
    counts_BT = np.unpackbits(bits, count=batch * time).reshape(batch, time).astype(bool)
    if not max(1, counts_BT.sum()) <= number <= LARGEST_MARKED:
        raise ValueError(f"{number} tokens count in a batch, and {counts_BT.sum()} in these rows of it; the stages have lost step")
    counts_BT1 = np.concatenate((np.ones((batch, 1), bool), counts_BT), axis=1)
    marked_BT1 = mark_ids(ids_BT1.to(torch.int32).numpy(), counts_BT1)
    return torch.from_numpy(add_number(marked_BT1, number))
