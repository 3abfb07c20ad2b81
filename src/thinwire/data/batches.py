"""Cut a token stream into windows and hand them out by global sample index.

The order is a function of seed and index alone: nothing is stored, so a resumed run, or one with another number of workers, sees the
same data. Returns numpy; putting batches on a device is the caller's job.
"""

from __future__ import annotations

import hashlib

import numpy as np

from thinwire.bits.targets import add_number, count_targets
from thinwire.data.stream import TokenStream

ROUNDS = 8
"""Even, so that halves of unequal width return to their places."""


def permute(position: int, size: int, key: str) -> int:
    """Map `position` to another below `size`, a bijection chosen by `key`: a Feistel network with cycle walking."""
    assert 0 <= position < size, (position, size)
    bits = max(2, (size - 1).bit_length())
    left_bits = bits // 2
    right_bits = bits - left_bits
    while True:
        left, right, width, other = position >> right_bits, position & ((1 << right_bits) - 1), left_bits, right_bits
        for number in range(ROUNDS):
            digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & ((1 << width) - 1))
            width, other = other, width
        position = left << right_bits | right
        # outside: walk on along the cycle, which leads back inside (domain < 2 * size, or 4 for tiny sizes)
        if position < size:
            return position


class Windows:
    """Cut a stream into windows of T+1 tokens at stride T."""

    marked = False
    """Whether its ids say which of them count in the loss."""

    def __init__(self, stream: TokenStream, context: int, name: str) -> None:
        if len(stream) < context + 1:
            raise ValueError(
                f"{name}: {len(stream)} tokens found, but one sequence needs {context + 1} (model.context {context} and the next token): "
                f"give more text or lower --model.context"
            )
        self.stream = stream
        self.context = context
        self.count = (len(stream) - 1) // context

    def __len__(self) -> int:
        return self.count

    @property
    def tokens(self) -> int:
        """Return how many tokens there are."""
        return len(self.stream)

    def read(self, position: int) -> np.ndarray:
        """Return window `position`, int64 of T+1."""
        return self.stream.read(position * self.context, self.context + 1)

    def evenly(self, count: int) -> np.ndarray:
        """Return `count` windows evenly spaced over the stream, in order, or all of them if there are fewer: int64 of N x (T+1)."""
        if count < 1:
            raise ValueError(f"{count} validation sequences asked for: ask for at least 1 (--train.validation-sequences)")
        taken = min(count, self.count)
        return np.stack([self.read(index * self.count // taken) for index in range(taken)])


class Samples:
    """What a run trains on, by global sample index."""

    marked = False
    """Whether ids say which of them count in the loss."""
    tokens: int | None = None
    """How many tokens there are; None: not known."""
    epoch: int | None = None
    """Samples until one may come again; None: not known."""

    def sample(self, index: int) -> np.ndarray:
        """Return the sample of a global index, int64 of T+1."""
        raise NotImplementedError

    def batch(self, first_index: int, count: int, step: range | None = None) -> np.ndarray:
        """Return samples `first_index` to `first_index + count`, int64 of B x (T+1); marked ones B x (T+2), see `bits/targets.py`.

        `step` are the samples of the whole step, of all replicas, if that is more.
        """
        assert count >= 1, count
        own = np.stack([self.sample(first_index + offset) for offset in range(count)])
        if not self.marked:
            return own
        others = () if step is None else (index for index in step if not first_index <= index < first_index + count)
        return add_number(own, count_targets(own) + sum(count_targets(self.sample(index)[None]) for index in others))


class Batches(Samples):
    """Hand out training windows in a new seeded order each epoch."""

    def __init__(self, windows: Windows, seed: int) -> None:
        self.windows, self.seed = windows, seed
        self.marked, self.tokens, self.epoch = windows.marked, windows.tokens, len(windows)

    def __len__(self) -> int:
        """Return the samples in one epoch."""
        return len(self.windows)

    def sample(self, index: int) -> np.ndarray:
        assert index >= 0, index
        epoch, position = divmod(index, len(self.windows))
        return self.windows.read(permute(position, len(self.windows), f"{self.seed}/{epoch}"))
