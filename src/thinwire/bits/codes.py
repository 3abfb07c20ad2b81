"""Integer codes of any width as bytes: row-major, the first code of a byte in its lowest bits, the last byte padded with zeros.

Up to 8 bits torch does it where the codes are, in words of as many bytes as there are codes until their bits fill whole bytes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from thinwire.bits.raw import Buffer, TensorSpec, numbers, raw_bytes

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A word that holds so many codes, a byte each."""


def packed_size(count: int, bits: int) -> int:
    """Return the bytes that `count` codes take."""
    return math.ceil(count * bits / 8)


def group_size(bits: int) -> int:
    """Return how many codes fill whole bytes."""
    return 8 // math.gcd(8, bits)


def pack_codes(codes: Tensor, bits: int, lowest: int = 0) -> bytes:
    """Store integer-valued codes from `lowest` on in `bits` bits each."""
    if bits > 8:
        unsigned = (codes.detach().flatten().cpu() - lowest).to(torch.int64).numpy().view(np.uint64)
        places = (unsigned[:, None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
        return np.packbits(places.astype(np.uint8).ravel(), bitorder="little").tobytes()
    return raw_bytes(squeeze(to_octets(codes.detach().flatten(), lowest), bits))


def to_octets(codes: Tensor, lowest: int) -> Tensor:
    """Return codes from `lowest` on as a byte each, counted from 0."""
    if lowest < 0:
        return codes.to(torch.int8, copy=True).view(torch.uint8).sub_(lowest)  # bytes count modulo 256, so the sign is no matter
    return codes.to(torch.uint8) - lowest if lowest else codes.to(torch.uint8)


def squeeze(octets: Tensor, bits: int) -> Tensor:
    """Push codes of a byte each together."""
    count, group = len(octets), group_size(bits)
    if group == 1:
        return octets
    words = functional.pad(octets, (0, -count % group)).view(WORDS[group])
    # Neighbours first, then pairs of them, and so on: their bits come to lie side by side.
    for step in range(group.bit_length() - 1):
        first = bits_of_runs(group, bits, step)
        words = (words >> ((8 - bits) << step)).bitwise_and_(first << (bits << step)).bitwise_or_(words & first)
    if group * bits == 8:
        return words.to(torch.uint8)
    return words.view(torch.uint8).view(-1, group)[:, : group * bits // 8].flatten()[: packed_size(count, bits)]


def spread(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `squeeze`: return `count` codes, a byte each."""
    group = group_size(bits)
    if group == 1:
        return packed
    filled = group * bits // 8
    rows = functional.pad(packed, (0, -len(packed) % filled)).view(-1, filled)
    words = packed.to(WORDS[group]) if filled == 1 else functional.pad(rows, (0, group - filled)).view(WORDS[group]).flatten()
    for step in reversed(range(group.bit_length() - 1)):
        first = bits_of_runs(group, bits, step)
        words = (words << ((8 - bits) << step)).bitwise_and_(first << (8 << step)).bitwise_or_(words & first)
    return words.view(torch.uint8)[:count]


def bits_of_runs(group: int, bits: int, step: int) -> int:
    """Return a word with ones where every second run of 2^step codes lies, its bits together at the bottom of as many bytes."""
    return sum((2 ** (bits << step) - 1) << place for place in range(0, 8 * group, 16 << step))


def unpack_codes(data: Buffer, bits: int, spec: TensorSpec, lowest: int = 0) -> Tensor:
    """Take integer-valued codes out of their bytes."""
    count = math.prod(spec.shape)
    if len(data) != packed_size(count, bits):
        raise ValueError(
            f"payload of {len(data)} bytes where {packed_size(count, bits)} were declared for {spec.shape} codes of {bits} bits"
        )
    if bits > 8:
        places = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count * bits, bitorder="little").reshape(count, bits)
        return torch.from_numpy((places.astype(np.int64) << np.arange(bits)).sum(1) + lowest).to(spec.dtype).view(spec.shape)
    octets = spread(numbers(data, torch.uint8, (len(data),)), bits, count)
    return octets.to(spec.dtype).add_(lowest).view(spec.shape) if lowest else octets.to(spec.dtype).view(spec.shape)
