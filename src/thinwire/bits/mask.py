"""Masks of the values that are sent, in bytes.

A mask is a bitmap, or the positions of its ones within each row in as few bits as they need; positions rise, so that one mask has
one coding. Values travel in the order of their positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.bits.codes import pack_codes, packed_size, unpack_codes
from thinwire.bits.grid import FORMAT
from thinwire.bits.raw import Buffer, TensorSpec
from thinwire.util.device import to_host

BITMAP, AS_POSITIONS = b"\0", b"\1"
"""The first byte of a mask says how it is written."""


def kept_count(density: float, count: int) -> int:
    """Return how many of `count` values are kept."""
    return max(1, round(density * count))


def at_least(sizes: Tensor, threshold: Tensor) -> Tensor:
    """Return the mask of sizes from a threshold on, NaN among them; a zero is not worth sending even where the threshold is zero."""
    return ~(sizes < threshold) & (sizes != 0)


def pick(source: Tensor, mask: Tensor, size: int) -> Tensor:
    """Return `size` values: those where the mask is true, in order, and then zeros."""
    if source.device.type == "cpu":
        picked = source.masked_select(mask)
        return functional.pad(picked, (0, size - len(picked))) if len(picked) < size else picked
    # A card would have to tell the host how many there are: let each value go to its place, and the others behind the end.
    places = torch.where(mask.flatten(), mask.flatten().cumsum(0) - 1, size)
    return torch.zeros(size + 1, dtype=source.dtype, device=source.device).scatter(0, places, source.flatten())[:size]


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mask, values):
        ctx.save_for_backward(mask)
        ctx.shape = values.shape
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter_(mask, values)

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        return None, pick(gradient, mask, ctx.shape.numel()).view(ctx.shape)


def fill(mask: Tensor, values: Tensor) -> Tensor:
    """Put values, in order, where the mask is true, and zeros elsewhere."""
    return _Fill.apply(mask, values)


def position_bits(count: int) -> int:
    """Return the bits that a position among `count` values needs."""
    return (count - 1).bit_length()


def position_bytes(kept: int, count: int) -> int:
    """Return the bytes of `kept` positions in rows of `count` values."""
    return packed_size(kept, position_bits(count))


def pack_positions(mask: Tensor) -> bytes:
    """Store where each row of a mask [rows, count] is set."""
    return pack_codes(to_host(mask.detach() != 0).nonzero()[:, 1], position_bits(mask.shape[1]))


def unpack_positions(data: Buffer, kept_R: Tensor, count: int) -> Tensor:
    """Make a mask from its positions, given how many ones each of its rows of `count` values has."""
    spec = TensorSpec((int(kept_R.sum()),), torch.int64, 0, 0)
    positions = unpack_codes(data, position_bits(count), spec)
    places = positions + count * torch.arange(len(kept_R)).repeat_interleave(kept_R)
    if (positions >= count).any() or (places.diff() <= 0).any():
        raise ValueError(f"payload of {len(data)} bytes where rising positions below {count} were declared; the bytes are damaged")
    return torch.zeros(len(kept_R) * count, dtype=FORMAT).index_fill_(0, places, 1).view(-1, count)


def no_gradient(data: Buffer, spec: TensorSpec) -> Tensor:
    """Return the gradient of a mask: zeros, for which no byte travels."""
    if data:
        raise ValueError(f"payload of {len(data)} bytes where 0 were declared for the gradient of a mask")
    return torch.zeros(spec.shape, dtype=spec.dtype)


def pack_mask(mask: Tensor) -> bytes:
    """Store a mask in its shorter form behind a byte that tells which it is; positions stand behind the number that each token has."""
    mask = to_host(mask.detach() != 0)
    rows = mask.reshape(-1, mask.shape[-1])
    kept_R, count = rows.count_nonzero(1), rows.shape[1]
    if number_bytes(len(rows), count) + position_bytes(int(kept_R.sum()), count) < packed_size(rows.numel(), 1):
        return AS_POSITIONS + pack_codes(kept_R, count.bit_length()) + pack_positions(rows)
    return BITMAP + pack_codes(mask, 1)


def unpack_mask(data: Buffer, spec: TensorSpec) -> Tensor:
    """Take a mask out of its bytes."""
    tag, body = bytes(data[:1]), data[1:]
    if tag == BITMAP:
        return unpack_codes(body, 1, spec)
    if tag != AS_POSITIONS:
        raise ValueError(f"payload of {len(data)} bytes where a mask that begins with {BITMAP!r} or {AS_POSITIONS!r} was declared")
    rows, count = math.prod(spec.shape[:-1]), spec.shape[-1]
    numbers = number_bytes(rows, count)
    kept_R = unpack_codes(body[:numbers], count.bit_length(), TensorSpec((rows,), torch.int64, numbers, 0))
    return unpack_positions(body[numbers:], kept_R, count).view(spec.shape)


def number_bytes(rows: int, count: int) -> int:
    """Return the bytes that say how many of its `count` values each row keeps."""
    return packed_size(rows, count.bit_length())
