"""Tensors that are mostly zero, as bytes.

A tensor is laid out in rows of `WIDTH` values. A byte tells whether a bitmap follows, or the number of values in each row and their
positions in it, whichever is shorter; then come the values. Nothing is lost but the sign of a zero, so sums may travel so too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.bits.codes import packed_size, unpack_codes
from thinwire.bits.mask import BITMAP, fill, number_bytes, pack_mask, position_bytes, unpack_mask
from thinwire.bits.packing import Raw
from thinwire.bits.raw import TensorSpec

WIDTH = 512
"""Values of a row. At a density of 1 % it makes positions shortest: 9 bits each, and 10 for the number of values in a row."""
SMALL = 256
"""Tensors of fewer values are exchanged whole, as are vectors: there is little to save, and every step needs them."""


def is_large(tensor: Tensor) -> bool:
    """Tell whether a tensor is worth making sparse."""
    return tensor.dim() > 1 and tensor.numel() >= SMALL


def fold(count: int) -> tuple[int, int]:
    """Return the rows and the width that `count` values are laid out in; the last row may be longer than the values."""
    width = min(WIDTH, count)
    return math.ceil(count / width), width


class Sparse:
    """A packing for `mean`: positions and values of what is not zero."""

    def pack(self, matrices: Sequence[Tensor]) -> bytes:
        """Turn matrices into bytes."""
        return b"".join(_pack(matrix) for matrix in matrices if matrix.numel())

    def unpack(self, data: bytes | memoryview, like: Sequence[Tensor], peer: int) -> list[Tensor]:
        """Return matrices of the same shapes and dtypes as `like`; refuse damaged bytes, which `peer` has sent."""
        rest, found = memoryview(data), []
        for number, matrix in enumerate(like):
            try:
                tensor, rest = _unpack(rest, matrix, peer) if matrix.numel() else (torch.empty_like(matrix), rest)
            except ValueError as error:
                raise ValueError(f"replica {peer} sent a damaged sparse tensor, number {number} of {len(like)}: {error}") from error
            found.append(tensor)
        if rest:
            raise ValueError(f"replica {peer} sent {len(rest)} bytes behind its sparse tensors; the replicas have lost step")
        return found


def _pack(matrix: Tensor) -> bytes:
    flat = matrix.detach().flatten()
    mask = flat != 0
    rows, width = fold(len(flat))
    values = flat.masked_select(mask)
    padded = functional.pad(mask.to(torch.uint8), (0, rows * width - len(flat)))
    return pack_mask(padded.view(rows, width)) + Raw().pack([values])


def _unpack(data: memoryview, like: Tensor, peer: int) -> tuple[Tensor, memoryview]:
    """Take one tensor off the front; return what is behind it."""
    count = like.numel()
    rows, width = fold(count)
    size = _mask_bytes(data, rows, width)
    mask = unpack_mask(data[:size], TensorSpec((rows, width), torch.uint8, size, 0)).flatten().bool()
    if mask[count:].any():
        raise ValueError(f"a position among {count} values is {int(mask.nonzero()[-1])}; the bytes are damaged")
    kept = int(mask.count_nonzero())
    end = size + kept * like.dtype.itemsize
    if len(data) < end:
        raise ValueError(f"it ends after {len(data)} bytes where {kept} values need {end}")
    (values,) = Raw().unpack(bytes(data[size:end]), [like.new_empty(kept)], peer)
    return fill(mask[:count].to(like.device), values).view(like.shape), data[end:]


def _mask_bytes(data: memoryview, rows: int, width: int) -> int:
    """Return the bytes of the mask at the front of a message; nothing is made of them before they are known to be there."""
    if bytes(data[:1]) == BITMAP:
        return 1 + packed_size(rows * width, 1)
    numbers = number_bytes(rows, width)
    kept_R = unpack_codes(data[1 : 1 + numbers], width.bit_length(), TensorSpec((rows,), torch.int64, numbers, 0))
    return 1 + numbers + position_bytes(int(kept_R.sum()), width)
