"""Step sizes by number: step n is 2^(n/32), the same bits on every machine.

A uniform quantiser tells its step size in two bytes, the number. The sizes are made by integer square roots, so no machine's `pow` decides
their last bit; quantities that count steps of one size are carried over to another in integers.
"""

from __future__ import annotations

import math
from functools import cache

OCTAVE = 32
"""Steps of the ladder from one size to its double."""
LOWEST, HIGHEST = -96 * OCTAVE, 64 * OCTAVE
"""First and last number; what is smaller or larger no training meets."""
FRACTION = 30
"""Bits behind the point of a ratio of two sizes."""


@cache
def mantissas() -> tuple[int, ...]:
    """Return 2^(i/32) for i from 0 to 31 in 1/2^30, rounded down."""
    # The root of a root ... of 2^i, with enough bits to spare that only the last rounding counts.
    found = []
    for place in range(OCTAVE):
        value = 1 << (place + OCTAVE * 2 * FRACTION)
        for _ in range(OCTAVE.bit_length() - 1):
            value = math.isqrt(value)
        found.append(value >> FRACTION)
    return tuple(found)


def step_size(number: int) -> float:
    """Return the size of step `number`, exact in fp32."""
    octaves, place = divmod(number, OCTAVE)
    return math.ldexp(mantissas()[place] >> (FRACTION - 23), octaves - 23)


def step_ratio(difference: int) -> tuple[int, int]:
    """Return (factor, shift) with 2^(difference/32) = factor / 2^shift: to multiply integers by."""
    octaves, place = divmod(difference, OCTAVE)
    factor = mantissas()[place]
    # Large ratios and small ones alike keep 31 bits of factor; the shift may be negative for none of the differences that are in use.
    return (factor << (octaves - FRACTION), 0) if octaves > FRACTION else (factor, FRACTION - octaves)


def nearest(size: float) -> int:
    """Return the number of the step nearest to a size, within the ladder."""
    if not 0 < size < math.inf:
        return LOWEST if size == 0 else HIGHEST
    return min(max(round(OCTAVE * math.log2(size)), LOWEST), HIGHEST)
