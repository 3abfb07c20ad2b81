"""Read and write `.bin` token shards in the layout of the nanoGPT speedruns.

A shard is 256 int32 (magic, version, number of tokens, zeros) and then that many uint16 tokens, little-endian. Ids above 65535 make it one
of version 2, which is ours: its tokens are uint32. No tokenizing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from thinwire.data.stream import Piece, clip
from thinwire.util.files import atomic_file

MAGIC = 20240520
FORMATS = {1: "<u2", 2: "<u4"}
"""Tokens by version."""
HEADER_BYTES = 256 * 4


def write_shard(path: str | Path, tokens: Sequence[int] | np.ndarray) -> None:
    """Write tokens as one shard, atomically."""
    tokens_N = np.asarray(tokens)
    if tokens_N.ndim != 1 or not len(tokens_N) or tokens_N.dtype.kind not in "iu" or len(tokens_N) >= 2**31:
        raise ValueError(
            f"{path}: a shard takes a row of 1 to {2**31 - 1} integers, not {tokens_N.dtype} of shape {tokens_N.shape}: "
            f"flatten the tokens, or split them over several shards"
        )
    low, high = int(tokens_N.min()), int(tokens_N.max())
    if low < 0 or high >= 2**31:
        raise ValueError(f"{path}: a shard holds ids from 0 to {2**31 - 1}, got {low} to {high}: give the ids of a tokenizer")
    version = 1 if high <= 65535 else 2
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, version, len(tokens_N)
    with atomic_file(Path(path)) as file:
        file.write(header.tobytes())
        file.write(tokens_N.astype(FORMATS[version]).tobytes())


def open_shard(path: Path) -> np.ndarray:
    """Map the tokens of one shard, after checking its header against its length."""
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise ValueError(f"{path} is {size} bytes, shorter than a shard's {HEADER_BYTES}-byte header: copy or write the shard again")
    magic, version, count = (int(number) for number in np.fromfile(path, dtype="<i4", count=3))
    if magic != MAGIC:
        raise ValueError(
            f"{path} starts with {magic}, not with the shard magic {MAGIC}: it is no token shard or is damaged; "
            f"write it with thinwire.data.shards.write_shard, or give text files a name that does not end in .bin"
        )
    if version not in FORMATS:
        raise ValueError(f"{path} is a shard of version {version}, only 1 and 2 are known: write it again with write_shard")
    if count <= 0:
        raise ValueError(f"{path} says it holds {count} tokens: remove it or write it again")
    expected = HEADER_BYTES + np.dtype(FORMATS[version]).itemsize * count
    if size != expected:
        raise ValueError(
            f"{path} is {size} bytes, but its header says {count} tokens, which is {expected} bytes: "
            f"it was cut short or damaged; copy or write the shard again"
        )
    return np.memmap(path, dtype=FORMATS[version], mode="r", offset=HEADER_BYTES, shape=(count,))


def split_shards(paths: Sequence[Path], max_tokens: int) -> tuple[list[Piece], list[Piece]]:
    """Return the training and validation pieces: files named `*val*`, or else the last tenth of the tokens, are validation."""
    pieces = [(path, open_shard(path)) for path in paths]
    train = [piece for piece in pieces if "val" not in piece[0].name]
    validation = [piece for piece in pieces if "val" in piece[0].name]
    if not train or not validation:
        total = sum(len(tokens_N) for _, tokens_N in pieces)
        cut = total - total // 10
        train, validation = clip(pieces, 0, cut), clip(pieces, cut, total)
    return clip(train, 0, max_tokens), clip(validation, 0, max_tokens)
