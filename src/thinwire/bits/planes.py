"""Byte planes, deflated: byte j of every value together, because sign and exponent are predictable and the mantissa is noise."""

from __future__ import annotations

import zlib

import numpy as np

from thinwire.bits.raw import Buffer

MOST_MEMORY = 9


def split_planes(data: bytes, period: int) -> bytes:
    """Sort bytes by their place within a period."""
    return b"".join(data[place::period] for place in range(period))


def join_planes(planes: Buffer, period: int) -> bytes:
    """Undo `split_planes`."""
    source, start = np.frombuffer(planes, dtype=np.uint8), 0
    joined = np.empty_like(source)
    for place in range(period):
        part = joined[place::period]
        part[:] = source[start : start + len(part)]
        start += len(part)
    return joined.tobytes()


def deflate(data: bytes, level: int) -> bytes:
    """Return a zlib stream of the data."""
    strategy = zlib.Z_DEFAULT_STRATEGY if level else zlib.Z_HUFFMAN_ONLY
    compressor = zlib.compressobj(level or zlib.Z_BEST_SPEED, zlib.DEFLATED, zlib.MAX_WBITS, MOST_MEMORY, strategy)
    return compressor.compress(data) + compressor.flush()


def inflate(data: Buffer, size: int) -> bytes:
    """Return the `size` bytes of a zlib stream, never making more than one beyond them."""
    decompressor = zlib.decompressobj()
    try:
        plain = decompressor.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"payload of {len(data)} damaged bytes where {size} deflated ones were declared: {error}") from None
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"payload of {len(data)} bytes where a whole zlib stream of {size} bytes and nothing behind it was declared")
    return plain
