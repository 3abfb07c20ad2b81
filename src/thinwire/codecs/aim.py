"""How fine to quantise: which step of the ladder comes next."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.bits.grid import WIDTHS
from thinwire.bits.ladder import HIGHEST, LOWEST, OCTAVE, nearest

MOST_CHANGE = OCTAVE // 2
"""How far the step size moves after one step."""
WEIGHT_CHANGE, WEIGHT_RANGE = OCTAVE // 8, 8 * OCTAVE
"""How far the weight of the bits in the loss moves after one step, and from where it began."""
FAR = 1.25
"""Share of the rate aimed at from which on a step size that is held grows all the same."""
# Step sizes beside the root mean square whose error is that of `quantize` with so many bits: scale of 1/127 and 1/7 of the largest of
# some 32 Gaussian values, and the Lloyd-Max levels' mean square errors of 0.0345, 0.1175 and 0.3634.
STEP_OF_BITS = dict(zip(WIDTHS, (0.019, 0.343, 0.644, 1.187, 2.088), strict=True))


@dataclass(frozen=True)
class Aim:
    """What the step size is steered to: bits per code, or the error of `quantize` with `bits`."""

    rate: float | None
    bits: int | None
    settled: int | None = None
    """Steps after which the step size is held, and grows only where the rate is far above; None: it is steered for ever."""

    def times(self, factor: float) -> Aim:
        """Aim at another rate."""
        return replace(self, rate=None if self.rate is None else self.rate * factor)

    @property
    def usual(self) -> float:
        """Return the bits per code to expect."""
        return self.rate if self.rate is not None else float(self.bits or 0)

    def first(self, spread: float) -> int:
        """Choose the first step for values of that root mean square: at many bits the entropy of a Gaussian, at few a bound."""
        share = STEP_OF_BITS[self.bits] if self.bits is not None else min(2.0, 2 ** (2.05 - self.usual))
        return nearest(spread * share)

    def next(self, number: int, rate: float, spread: float, age: int = 0) -> int:
        """Choose the step after one with that rate and root mean square of what was received, in steps."""
        if self.rate is not None:
            if self.settled is not None and age > self.settled and rate < FAR * self.rate:
                return number
            wanted = number + round(OCTAVE / 2 * (rate - self.rate))
        else:
            assert self.bits is not None
            wanted = number + nearest(spread * STEP_OF_BITS[self.bits]) if spread > 0 else number - MOST_CHANGE
        return min(max(wanted, number - MOST_CHANGE, LOWEST), number + MOST_CHANGE, HIGHEST)

    def next_weight(self, weight: int, rate: float, age: int) -> int:
        """Choose the weight of the bits in the loss, in 1/OCTAVE of a doubling, where that holds the rate."""
        if self.settled is None or age <= self.settled or self.rate is None:
            return weight
        change = round(OCTAVE * (rate / self.rate - 1))
        return min(max(weight + min(max(change, -WEIGHT_CHANGE), WEIGHT_CHANGE), -WEIGHT_RANGE), WEIGHT_RANGE)
