"""Integer codes as bytes, near their entropy: an adaptive table of frequencies for each size that a code is expected to have.

A row of codes is a token, a column a channel. A code's expected size is its channel's usual size times how large the token's codes in
earlier channels were beside theirs; columns are coded in a few blocks, so that a block's expectations are known from the blocks before.
The expectation chooses a class, the class a table of symbols: the code itself where codes are small, its upper bits where they are large
(the lower ones are as good as random), and one symbol for all that is further out. All of this is integers. The bytes are made by the
asymmetric numeral system coder of `constriction`, whose models are built from frequencies that sum to a power of two.

What the tables and the usual sizes are learnt from, and when, is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.bits.raw import Buffer

Ints = npt.NDArray[np.int64]
LIMIT = 2**15 - 1
"""Codes are -LIMIT to LIMIT."""
UNIT = 256
"""Usual sizes are means of |code| in 1/UNIT."""
PER_OCTAVE = 4
SMALLEST = -7
"""Binary logarithm of the size that the first class expects."""
CLASSES = PER_OCTAVE * 15
REACH = 31
"""Symbols 0 to 2 REACH stand for -REACH to REACH, the next one for everything else."""
OUTSIDE = 2 * REACH + 1
SYMBOLS = OUTSIDE + 1
LARGEST = 2**17
"""Largest expectation, in 1/UNIT; above it all are of the last class."""
TOTAL = 2**16
"""Sum of a table's frequencies."""
LEARNING, MEMORY, PRIOR = 16, 2**19, 2**11
"""What one code adds to its count, the most that the counts of a class add up to, and what they do at the start."""
INERTIA = 4
"""How many codes of usual size the expectation of a token's size begins with."""


def blocks(width: int) -> list[slice]:
    """Cut the channels into blocks whose expectations are known together: the first ones narrow, because they tell the most."""
    edges = sorted({0, width, *(math.ceil(width * share / 32) for share in (1, 2, 4, 6, 8, 12, 16, 20, 24, 28))})
    return [slice(start, stop) for start, stop in pairwise(edges)]


@cache
def class_of_size() -> npt.NDArray[np.uint8]:
    """Return the class of every expectation from 0 to LARGEST."""
    # Class c begins at 2^(SMALLEST + (c - 1/2) / PER_OCTAVE): compared as powers, in integers.
    power = 2 * PER_OCTAVE
    edges = []
    for number in range(1, CLASSES):
        exponent = power * SMALLEST + 2 * number - 1
        wanted = UNIT**power << max(exponent, 0)
        size = next_root(wanted, power, max(-exponent, 0))
        edges.append(size)
    return np.searchsorted(np.array(edges), np.arange(LARGEST + 1), side="right").astype(np.uint8)


def next_root(value: int, power: int, shift: int) -> int:
    """Return the least integer whose `power`-th power, a power of two, is at least value / 2^shift."""
    root, left = value, power
    while left > 1:
        root, left = math.isqrt(root), left // 2
    # Undo the shift by trial around the floating estimate: the comparison itself is in integers.
    guess = max(int(root / 2 ** (shift / power)) - 2, 0)
    while guess**power << shift < value:
        guess += 1
    return guess


@cache
def shifts() -> Ints:
    """Return how many lower bits the codes of each class are sent with as they are: none while a table reaches eight usual sizes."""
    octaves = SMALLEST + np.arange(CLASSES) // PER_OCTAVE
    return np.maximum(octaves - 1, 0)


@cache
def prior_counts() -> Ints:
    """Return the counts that every table begins with: two-sided geometric distributions of each class's size."""
    counts = np.zeros((CLASSES, SYMBOLS), dtype=np.int64)
    one = 1 << 40
    for number, shift in enumerate(shifts().tolist()):
        # mean = 2 r / (1 - r^2) for weights r^|symbol|, so r = (sqrt(1 + mean^2) - 1) / mean; 2^(1/4) to 2^(3/4) by integer roots.
        octaves, place = divmod(number, PER_OCTAVE)
        mean = math.isqrt(math.isqrt(1 << (place + 160))) << (octaves + 60) >> (60 - SMALLEST + shift)
        decay = ((math.isqrt(one * one + mean * mean) - one) << 40) // mean
        weight, weights = one, []
        for _ in range(REACH + 1):
            weights.append(weight)
            weight = weight * decay >> 40
        line = weights[:0:-1] + weights + [weight]
        total = sum(line)
        counts[number] = [each * PRIOR // total for each in line]
    return counts


@dataclass(frozen=True)
class Tables:
    """The frequencies of all classes, as the coder uses them."""

    frequencies: Ints
    models: list[Any]

    @classmethod
    def of(cls, counts: Ints) -> Tables:
        """Make tables of counts: every symbol can occur, and each table's frequencies sum to TOTAL."""
        totals = np.maximum(counts.sum(1, keepdims=True), 1)
        frequencies = 1 + counts * (TOTAL - SYMBOLS) // totals
        frequencies[np.arange(CLASSES), frequencies.argmax(1)] += TOTAL - frequencies.sum(1)
        # Dyadic, so exact as floating numbers, and exact in the library's fixed-point cumulative sums.
        models = [coding().Categorical(line / TOTAL, perfect=False) for line in frequencies]
        return cls(frequencies, models)

    def lengths(self) -> npt.NDArray[np.float64]:
        """Return the bits that each symbol of each class takes, the lower bits of its code included."""
        bits = math.log2(TOTAL) - np.log2(self.frequencies) + shifts()[:, None]
        bits[:, OUTSIDE] += 16 - shifts()
        return bits


def coding() -> Any:
    """Return the models of the library that makes the bytes, imported when first used."""
    return library().stream.model


def library() -> Any:
    try:
        import constriction  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(
            "codec.entropy needs the package constriction, which is not installed here; pip install constriction "
            "(it has no wheel for Linux on ARM), or leave codec.entropy out"
        ) from None
    return constriction


def coder_of(data: Buffer) -> Any:
    """Return a coder that takes symbols out of bytes."""
    words = np.frombuffer(data, "<u4").astype(np.uint32) if len(data) % 4 == 0 else np.zeros(0, np.uint32)
    if not len(words) or not words[-1]:
        raise ValueError(f"payload of {len(data)} bytes where words of 4 bytes that do not end in zeros were declared")
    return library().stream.stack.AnsCoder(words)


def empty_coder() -> Any:
    """Return a coder to put symbols in, with a one at its bottom: when bytes are missing, zeros come out there."""
    coder = library().stream.stack.AnsCoder()
    coder.encode_reverse(np.ones(1, dtype=np.int32), coding().Uniform(2))
    return coder


def refuse_rest(coder: Any, what: str, size: int) -> None:
    """Refuse bytes that are not used up when `what` was taken out of them, or that were too few for it."""
    if coder.decode(coding().Uniform(2), 1)[0] != 1 or not coder.is_empty():
        raise ValueError(f"payload of {size} bytes where those of {what} were declared; they are damaged")


def expectations(codes: Ints, done: slice, sizes: Ints, block: slice) -> npt.NDArray[np.uint8]:
    """Return the classes of a block's codes, given the codes of the channels before it."""
    usual = int(sizes.sum()) // len(sizes) + 1
    seen = np.minimum(np.abs(codes[:, done]), REACH * UNIT).sum(1) * UNIT + INERTIA * usual
    expected = seen * UNIT // (int(sizes[done].sum()) + INERTIA * usual)
    found = np.minimum((expected[:, None] * sizes[block]) // UNIT, LARGEST)
    return class_of_size()[found]


@dataclass(frozen=True)
class Split:
    """The codes of a block as what is coded, in the order of their classes."""

    order: Ints
    classes: npt.NDArray[np.uint8]
    """In that order."""
    edges: Ints
    """Where each class begins and ends in that order."""

    @classmethod
    def of(cls, classes: npt.NDArray[np.uint8]) -> Split:
        flat = classes.ravel()
        order = np.argsort(flat, kind="stable")
        return cls(order, flat[order], np.searchsorted(flat[order], np.arange(CLASSES + 1)))

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (class, start, stop) of the classes that occur."""
        for number in np.unique(self.classes).tolist():
            yield number, int(self.edges[number]), int(self.edges[number + 1])


def symbols_of(codes: Ints, classes: npt.NDArray[np.uint8]) -> Ints:
    """Return the symbols of codes."""
    upper = codes >> shifts()[classes]
    return np.where(np.abs(upper) <= REACH, upper + REACH, OUTSIDE)


def count_symbols(codes: Ints, sizes: Ints) -> Ints:
    """Count each class's symbols in rows of codes."""
    counts = np.zeros(CLASSES * SYMBOLS, dtype=np.int64)
    for block in blocks(codes.shape[1]):
        classes = expectations(codes, slice(0, block.start), sizes, block)
        symbols = symbols_of(codes[:, block], classes)
        counts += np.bincount((classes.astype(np.int64) * SYMBOLS + symbols).ravel(), minlength=len(counts))
    return counts.reshape(CLASSES, SYMBOLS)


def learn_counts(counts: Ints, found: Ints) -> Ints:
    """Return the counts of all steps so far, older ones fading, and of the codes found in one more."""
    counts = counts + LEARNING * found
    while (over := counts.sum(1, keepdims=True) > MEMORY).any():
        counts = np.where(over, counts - (counts + 1) // 2, counts)
    return counts


def encode_codes(codes: Ints, sizes: Ints, tables: Tables) -> bytes:
    """Put rows of codes into bytes."""
    parts: list[tuple[Any, Ints]] = []
    for block in blocks(codes.shape[1]):
        split = Split.of(expectations(codes, slice(0, block.start), sizes, block))
        ordered = codes[:, block].ravel()[split.order]
        symbols = symbols_of(ordered, split.classes)
        for number, start, stop in split.runs():
            parts.append((tables.models[number], symbols[start:stop]))
            if shift := int(shifts()[number]):
                parts.append((coding().Uniform(1 << shift), ordered[start:stop] & ((1 << shift) - 1)))
        outside = ordered[symbols == OUTSIDE]
        if len(outside):
            parts.append((coding().Uniform(2 * LIMIT + 2), outside + LIMIT))
    coder = empty_coder()
    for model, symbols in reversed(parts):
        coder.encode_reverse(symbols.astype(np.int32), model)
    return coder.get_compressed().astype("<u4").tobytes()


def decode_codes(data: Buffer, rows: int, sizes: Ints, tables: Tables) -> Ints:
    """Take `rows` rows of codes out of `encode_codes`'s bytes."""
    coder = coder_of(data)
    codes = np.zeros((rows, len(sizes)), dtype=np.int64)
    for block in blocks(len(sizes)):
        split = Split.of(expectations(codes, slice(0, block.start), sizes, block))
        symbols, lower = np.empty(len(split.order), np.int64), np.zeros(len(split.order), np.int64)
        for number, start, stop in split.runs():
            symbols[start:stop] = coder.decode(tables.models[number], stop - start)
            if shift := int(shifts()[number]):
                lower[start:stop] = coder.decode(coding().Uniform(1 << shift), stop - start)
        ordered = (symbols - REACH << shifts()[split.classes]) + lower
        outside = symbols == OUTSIDE
        if count := int(outside.sum()):
            ordered[outside] = coder.decode(coding().Uniform(2 * LIMIT + 2), count).astype(np.int64) - LIMIT
        flat = np.empty_like(ordered)
        flat[split.order] = ordered
        codes[:, block] = flat.reshape(rows, -1)
    refuse_rest(coder, f"{rows} x {len(sizes)} codes", len(data))
    return codes
