"""Masks of the values that cross a boundary: as a payload tensor of zeros and ones without gradient, and in bytes.

In bytes a mask is a bitmap, or the positions of its ones within each row in as few bits as they need; positions rise, so that one mask has
one coding. Values travel in the order of their positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.codecs.base import Buffer, Context, TensorSpec, absorb
from thinwire.codecs.grid import FORMAT, pack_codes, packed_size, unpack_codes


class MaskEntry(nn.Module):
    """Put the values received where the mask received says."""

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        values, mask = payload
        return absorb(fill(mask.bool(), values.to(self.compute)), mask)


def fill(mask: Tensor, values: Tensor) -> Tensor:
    """Put values, in order, where the mask is true, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def position_bits(count: int) -> int:
    """Return the bits that a position among `count` values needs."""
    return (count - 1).bit_length()


def position_bytes(kept: int, count: int) -> int:
    """Return the bytes of `kept` positions in rows of `count` values."""
    return packed_size(kept, position_bits(count))


def pack_positions(mask: Tensor) -> bytes:
    """Store where each row of a mask [rows, count] is set."""
    return pack_codes(mask.detach().nonzero()[:, 1], position_bits(mask.shape[1]))


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
