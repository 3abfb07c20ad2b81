"""The rotation that makes channels uncorrelated, the same bits on every machine.

Jacobi's method in its parallel order, of which numpy does one operation after the other on float64: products, sums, quotients and square
roots of single numbers, which IEEE 754 rounds alike everywhere. A library's eigenvectors differ in their last bits between machines, and
by whole rotations where two eigenvalues are equal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
SWEEPS = 5
"""Rounds over all pairs; after five the rest is far below what a code's step resolves."""


def pairings(width: int) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Return rounds of disjoint pairs that together are all pairs: the tournament of an even number of players, one of whom may be away."""
    players = list(range(width + width % 2))
    half, rounds = len(players) // 2, []
    for _ in range(len(players) - 1):
        pairs = [(min(pair), max(pair)) for pair in zip(players[:half], players[: half - 1 : -1], strict=True) if max(pair) < width]
        rounds.append((np.array([first for first, _ in pairs]), np.array([second for _, second in pairs])))
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def turn(matrix: Floats, first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return cosine and sine of the rotations that make the elements at these pairs zero."""
    across = matrix[first, second]
    apart = across != 0
    slope = (matrix[second, second] - matrix[first, first]) / np.where(apart, 2 * across, 1)
    with np.errstate(over="ignore"):
        tangent = np.where(slope < 0, -1.0, 1.0) / (np.abs(slope) + np.sqrt(1 + slope * slope))
    tangent = np.where(apart, tangent, 0.0)
    cosine = 1 / np.sqrt(1 + tangent * tangent)
    return cosine, tangent * cosine


def rotate_columns(matrix: Floats, first: npt.NDArray[np.int64], second: npt.NDArray[np.int64], cosine: Floats, sine: Floats) -> None:
    """Rotate pairs of columns in place."""
    left, right = matrix[:, first], matrix[:, second]
    matrix[:, first] = cosine * left - sine * right
    matrix[:, second] = sine * left + cosine * right


def principal(moments_KK: Floats) -> tuple[Floats, Floats]:
    """Return the variances along the principal axes of a symmetric matrix, largest first, and the axes as columns."""
    matrix, axes = moments_KK.copy(), np.eye(len(moments_KK))
    for _ in range(SWEEPS):
        for first, second in pairings(len(matrix)):
            cosine, sine = turn(matrix, first, second)
            rotate_columns(matrix, first, second, cosine, sine)
            rotate_columns(matrix.T, first, second, cosine, sine)
            rotate_columns(axes, first, second, cosine, sine)
    variances = np.maximum(np.diagonal(matrix), 0.0)
    order = np.argsort(-variances, kind="stable")
    return variances[order], axes[:, order]


def add(values: Floats) -> float:
    """Add up numbers one after the other."""
    return float(np.add.accumulate(values)[-1])


def ordered_product(left: Floats, right: Floats) -> Floats:
    """Multiply two matrices, column by column of the first."""
    total = np.zeros_like(left)
    for column in range(len(right)):
        total = total + left[:, column : column + 1] * right[column]
    return total
