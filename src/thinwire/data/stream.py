"""One long row of token ids that may lie in several memory-mapped arrays.

Reads what is asked for and no more; where the arrays come from is the job of `shards.py` and `cache.py`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

Piece = tuple[Path, np.ndarray]
"""A file and (part of) its tokens."""

BLOCK_TOKENS = 1 << 15
BLOCKS = 64


class TokenStream:
    """Hold the pieces of a token row and hand out checked slices of it."""

    def __init__(self, pieces: Sequence[Piece], vocabulary: int) -> None:
        self.pieces = [(path, tokens_N) for path, tokens_N in pieces if len(tokens_N)]
        self.vocabulary = vocabulary
        self._ends = list(accumulate(len(tokens_N) for _, tokens_N in self.pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from `start` as int64."""
        assert 0 <= start <= start + count <= len(self), (start, count, len(self))
        ids_N = np.empty(count, dtype=np.int64)
        done = 0
        piece = bisect_right(self._ends, start)
        while done < count:
            path, tokens_N = self.pieces[piece]
            offset = start + done - (self._ends[piece] - len(tokens_N))
            part_N = tokens_N[offset : offset + count - done]
            check_ids(path, part_N, self.vocabulary)
            ids_N[done : done + len(part_N)] = part_N
            done += len(part_N)
            piece += 1
        return ids_N


def clip(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """Return the pieces that hold tokens `start` to `stop`, without reading them."""
    clipped = []
    first = 0
    for path, tokens_N in pieces:
        low, high = max(start - first, 0), min(stop - first, len(tokens_N))
        if low < high:
            clipped.append((path, tokens_N[low:high]))
        first += len(tokens_N)
    return clipped


def check_ids(path: Path, tokens_N: np.ndarray, vocabulary: int) -> None:
    """Refuse tokens that the model has no embedding for."""
    largest = int(tokens_N.max(initial=0))
    if largest >= vocabulary:
        raise ValueError(
            f"{path} holds token id {largest}, but model.vocabulary is {vocabulary}: set --model.vocabulary to at least {largest + 1} "
            f"(the size of the tokenizer that made the file) or give tokens made with a smaller tokenizer"
        )


def inspect(stream: TokenStream) -> str:
    """Check evenly spaced blocks of each piece and return the sha256 over them: all of a small piece, 4 MB of a large one."""
    digest = hashlib.sha256()
    for path, tokens_N in stream.pieces:
        blocks = list(_blocks(tokens_N))
        # one check over all blocks, so that the error names the largest id found
        check_ids(path, np.array([block_N.max() for block_N in blocks]), stream.vocabulary)
        digest.update(f"{len(tokens_N)}\n".encode())
        for block_N in blocks:
            digest.update(block_N.tobytes())
    return digest.hexdigest()


def _blocks(tokens_N: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the whole array in blocks, or `BLOCKS` of them evenly spaced with both ends included."""
    length = len(tokens_N)
    if length <= BLOCKS * BLOCK_TOKENS:
        starts = list(range(0, length, BLOCK_TOKENS))
    else:
        starts = [index * (length - BLOCK_TOKENS) // (BLOCKS - 1) for index in range(BLOCKS)]
    for start in starts:
        yield tokens_N[start : start + BLOCK_TOKENS]
