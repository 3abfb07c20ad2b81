"""Integer codes of any width as bytes: row-major, the first code of a byte in its lowest bits, the last byte padded with zeros."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from thinwire.bits.raw import Buffer, TensorSpec


def packed_size(count: int, bits: int) -> int:
    """Return the bytes that `count` codes take."""
    return math.ceil(count * bits / 8)


def pack_codes(codes: Tensor, bits: int, lowest: int = 0) -> bytes:
    """Store integer-valued codes from `lowest` on in `bits` bits each."""
    count = codes.numel()
    unsigned = (codes.detach().flatten().cpu() - lowest).to(torch.int64).numpy().view(np.uint64)
    if bits > 8:
        places = (unsigned[:, None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
        return np.packbits(places.astype(np.uint8).ravel(), bitorder="little").tobytes()
    # Eight codes of b bits are b bytes: put together in one 64-bit word, of which b bytes are kept.
    words = np.zeros((count + 7) // 8, dtype="<u8")
    for place in range(8):
        part = unsigned[place::8]
        words[: len(part)] |= part << np.uint64(place * bits)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].tobytes()[: packed_size(count, bits)]


def unpack_codes(data: Buffer, bits: int, spec: TensorSpec, lowest: int = 0) -> Tensor:
    """Take integer-valued codes out of their bytes."""
    count = math.prod(spec.shape)
    if len(data) != packed_size(count, bits):
        raise ValueError(
            f"payload of {len(data)} bytes where {packed_size(count, bits)} were declared for {spec.shape} codes of {bits} bits"
        )
    packed = np.frombuffer(data, dtype=np.uint8)
    if bits > 8:
        places = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
        unsigned = (places.astype(np.int64) << np.arange(bits)).sum(1)
    else:
        words = np.zeros(((count + 7) // 8, 8), dtype=np.uint8)
        padded = np.zeros(len(words) * bits, dtype=np.uint8)
        padded[: len(packed)] = packed
        words[:, :bits] = padded.reshape(-1, bits)
        shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
        unsigned = ((words.view("<u8") >> shifts) & np.uint64(2**bits - 1)).ravel()[:count].astype(np.int64)
    return torch.from_numpy(unsigned + lowest).to(spec.dtype).view(spec.shape)
