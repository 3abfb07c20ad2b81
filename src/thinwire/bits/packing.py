"""How numbers become bytes between replicas, and back. A packing may be lossy; both ends see exactly what `unpack` makes of the bytes.

| name | bits per fp32 value | error |
|---|---|---|
| `fp32` | 32 (fp64 travels as fp64) | none |
| `lossless` | about 28 on Gaussian values | none |
| `bf16` | 16 | 2^-8 of each value |
| `int8` | 8, and a scale per row | 1/254 of the largest value of the row |
| `zfpN`, N from 3 to 32 | N | relative RMS on Gaussian values: 5.4e-2 for 8, 3.4e-3 for 12, 2.1e-4 for 16 |

All take fp32 and fp64 matrices, empty ones too. What is not finite does not come back finite: a step that has diverged must be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.bits.planes import deflate, inflate, join_planes, split_planes
from thinwire.bits.raw import numbers, raw_bytes, split_sizes

BLOCK = 256
"""Most values of a vector that share a scale."""
LARGEST_CODE = 127
RATES = range(3, 33)
"""Bits per value that ZFP can be given: with fewer the exponent of a block does not fit, with more fp32 gains nothing."""
ZFP_BLOCK = 4
FINITE, NOT_FINITE = b"\0", b"\1"


class Packing(Protocol):
    """What matrices may be sent in."""

    def pack(self, matrices: Sequence[Tensor]) -> bytes:
        """Turn matrices into bytes."""
        ...

    def unpack(self, data: bytes, like: Sequence[Tensor], peer: int) -> list[Tensor]:
        """Return matrices of the same shapes and dtypes as `like`; refuse bytes of another length, which `peer` has sent."""
        ...


class Raw:
    """The numbers as they are."""

    def pack(self, matrices: Sequence[Tensor]) -> bytes:
        return b"".join(map(raw_bytes, matrices))

    def unpack(self, data: bytes, like: Sequence[Tensor], peer: int) -> list[Tensor]:
        parts = split_sizes(data, [matrix.nbytes for matrix in like], peer)
        return [numbers(part, matrix.dtype, matrix.shape).to(matrix.device) for part, matrix in zip(parts, like, strict=True)]


class BFloat16:
    """The upper half of fp32, rounded to nearest: a value comes back within 2^-8 of its size, and within 2^-134 below 2^-126."""

    def pack(self, matrices: Sequence[Tensor]) -> bytes:
        return b"".join(raw_bytes(matrix.to(torch.bfloat16)) for matrix in matrices)

    def unpack(self, data: bytes, like: Sequence[Tensor], peer: int) -> list[Tensor]:
        parts = split_sizes(data, [2 * matrix.numel() for matrix in like], peer)
        return [numbers(part, torch.bfloat16, matrix.shape).to(matrix) for part, matrix in zip(parts, like, strict=True)]


class Int8:
    """Codes -127 to 127 and a scale per row, in the format of the matrix; a single row, as a vector is, has one per block of 256 values.

    A value comes back within half a step, and a step is 1/127 of the largest value of the row, or the smallest normal number if that is
    more: so rows of zeros and of denormal numbers need no case of their own. On rows of 512 Gaussian values that is a relative RMS of
    7.4e-3. A row with a value that is not finite comes back as nan.
    """

    def pack(self, matrices: Sequence[Tensor]) -> bytes:
        parts = []
        for matrix in matrices:
            rows, limits = _rows(matrix.detach()), torch.finfo(matrix.dtype)
            # A hair less than the largest value asks for, whose code then times its scale never rounds up to infinity.
            scales = (rows.abs().amax(1, keepdim=True) * ((1 - 2 * limits.eps) / LARGEST_CODE)).clamp_min(limits.tiny)
            codes = (rows / scales).round_().nan_to_num_(0.0).to(torch.int8)
            parts += [raw_bytes(scales), raw_bytes(codes.flatten()[: matrix.numel()])]
        return b"".join(parts)

    def unpack(self, data: bytes, like: Sequence[Tensor], peer: int) -> list[Tensor]:
        counts = [_row_form(matrix)[0] for matrix in like]
        sizes = [size for matrix, count in zip(like, counts, strict=True) for size in (count * matrix.element_size(), matrix.numel())]
        parts = iter(split_sizes(data, sizes, peer))
        matrices = []
        for matrix, count in zip(like, counts, strict=True):
            scales = numbers(next(parts), matrix.dtype, (count, 1))
            codes = _rows(numbers(next(parts), torch.int8, matrix.shape).to(matrix.dtype))
            matrices.append((codes * scales).flatten()[: matrix.numel()].view(matrix.shape).to(matrix.device))
        return matrices


class Zfp:
    """ZFP at a fixed rate of bits per value: four values in a row share an exponent and a transform (systems, section 7).

    A message is a byte that says whether all its numbers are finite, as ZFP itself knows no others, and then the stream of each matrix
    without a header, whose length follows from shape and rate: so nothing that a peer sends can claim another shape.
    """

    def __init__(self, rate: int) -> None:
        if rate not in RATES:
            raise ValueError(
                f"zfp is given {rate} bits per value; choose {RATES.start} to {RATES.stop - 1}, such as 8, or 16 for little loss"
            )
        self.rate = rate
        self.zfpy: Any = _import_zfpy(rate)

    def pack(self, matrices: Sequence[Tensor]) -> bytes:
        if not all(bool(matrix.isfinite().all()) for matrix in matrices):
            return NOT_FINITE + bytes(sum(map(self.size, matrices)))
        # zfpy crashes the process on an array without values.
        flat = [matrix.detach().cpu().flatten().numpy() for matrix in matrices if matrix.numel()]
        return FINITE + b"".join(self.zfpy.compress_numpy(values, rate=self.rate, write_header=False) for values in flat)

    def unpack(self, data: bytes, like: Sequence[Tensor], peer: int) -> list[Tensor]:
        flag, *parts = split_sizes(data, [1, *map(self.size, like)], peer)
        if flag == NOT_FINITE:
            return [torch.full_like(matrix, torch.nan) for matrix in like]
        if flag != FINITE:
            raise ValueError(f"replica {peer} sent a message that starts with {flag[0]}; it can be 0 for finite numbers or 1 for others")
        return [self._expand(part, matrix) for part, matrix in zip(parts, like, strict=True)]

    def size(self, matrix: Tensor) -> int:
        """Return the bytes of a matrix: whole blocks of four values, in whole words of 64 bits."""
        return math.ceil(math.ceil(matrix.numel() / ZFP_BLOCK) * ZFP_BLOCK * self.rate / 64) * 8

    def _expand(self, part: memoryview, like: Tensor) -> Tensor:
        if not like.numel():
            return like.detach().clone()
        kind = self.zfpy.type_double if like.dtype == torch.float64 else self.zfpy.type_float
        values = self.zfpy._decompress(bytes(part), kind, (like.numel(),), rate=self.rate)
        return torch.from_numpy(values).clone().view(like.shape).to(like.device)


class Deflated:
    """The numbers as they are, the first bytes of all values together, then the second ones and so on, deflated by their frequency."""

    def pack(self, matrices: Sequence[Tensor]) -> bytes:
        planes = [split_planes(Raw().pack([matrices[place] for place in places]), width) for width, places in _by_width(matrices)]
        return deflate(b"".join(planes), 0)

    def unpack(self, data: bytes, like: Sequence[Tensor], peer: int) -> list[Tensor]:
        try:
            planes = inflate(data, sum(matrix.nbytes for matrix in like))
        except ValueError as error:
            raise ValueError(f"replica {peer} sent a {error}") from None
        groups = _by_width(like)
        parts = split_sizes(planes, [sum(like[place].nbytes for place in places) for _, places in groups], peer)
        found: dict[int, Tensor] = {}
        for (width, places), part in zip(groups, parts, strict=True):
            found |= zip(places, Raw().unpack(join_planes(part, width), [like[place] for place in places], peer), strict=True)
        return [found[place] for place in range(len(like))]


PLAIN: dict[str, type[Packing]] = {"fp32": Raw, "bf16": BFloat16, "int8": Int8, "lossless": Deflated}


def make_packing(text: str) -> Packing:
    """Return the packing of that name."""
    if text in PLAIN:
        return PLAIN[text]()
    rate = text.removeprefix("zfp")
    if rate == text or not rate.isdecimal():
        raise ValueError(f"unknown packing {text!r}; choose {', '.join(PLAIN)}, or zfp with bits per value such as zfp8")
    return Zfp(int(rate))


def _import_zfpy(rate: int) -> Any:
    try:
        return import_module("zfpy")
    except ImportError as error:
        raise ValueError(
            f"zfp{rate} needs the package zfpy, which cannot be imported ({error}); install it, in the checkout, "
            "with: pip install -c constraints.txt -e '.[zfp]'"
        ) from error


def _row_form(matrix: Tensor) -> tuple[int, int]:
    """Return how many rows, or blocks of a single one, have a scale of their own, and how many values each of them holds."""
    rows, columns = matrix.shape
    if rows == 1:
        return math.ceil(columns / BLOCK), min(columns, BLOCK)
    return (rows, columns) if columns else (0, 1)


def _rows(matrix: Tensor) -> Tensor:
    """View a matrix as what `_row_form` says, with zeros behind the end of the last block."""
    count, width = _row_form(matrix)
    flat = matrix.flatten()
    return functional.pad(flat, (0, count * width - len(flat))).view(count, max(width, 1))


def _by_width(matrices: Sequence[Tensor]) -> list[tuple[int, list[int]]]:
    """Return the places of the matrices whose values take as many bytes, for each such number."""
    widths = [matrix.element_size() for matrix in matrices]
    return [(width, [place for place, other in enumerate(widths) if other == width]) for width in sorted(set(widths))]
