"""Principal axes by Jacobi's method: right, in order, and the same bits on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from thinwire.codecs.rotation import add, ordered_product, pairings, principal


def moments(width: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(-20, 20, size=(200, width)) * (1 + np.arange(width))
    return (values.T @ values).astype(np.float64)


@pytest.mark.parametrize("width", [2, 3, 8, 15, 32])
def test_axes_are_orthonormal_and_make_the_matrix_diagonal(width):
    matrix = moments(width)
    variances, axes = principal(matrix)
    assert np.abs(axes.T @ axes - np.eye(width)).max() < 1e-12
    assert np.abs(axes.T @ matrix @ axes - np.diag(variances)).max() < 1e-6 * variances.max()
    assert (np.diff(variances) <= 0).all()
    assert np.allclose(variances, np.sort(np.linalg.eigvalsh(matrix))[::-1], rtol=1e-6)


@pytest.mark.parametrize("matrix", [np.zeros((4, 4)), np.eye(5), np.ones((3, 3)), np.diag([1.0, 3.0, 2.0])])
def test_matrices_with_equal_variances(matrix):
    variances, axes = principal(matrix)
    assert np.abs(axes.T @ axes - np.eye(len(matrix))).max() < 1e-12
    assert np.allclose(axes @ np.diag(variances) @ axes.T, matrix, atol=1e-9)


@pytest.mark.parametrize("width", [2, 3, 4, 7, 32])
def test_every_pair_has_its_turn_once(width):
    found = [pair for first, second in pairings(width) for pair in zip(first.tolist(), second.tolist(), strict=True)]
    assert sorted(found) == [(low, high) for low in range(width) for high in range(low + 1, width)]
    for first, second in pairings(width):
        assert len({*first.tolist(), *second.tolist()}) == 2 * len(first)


def test_golden():
    values = (np.arange(12 * 12, dtype=np.int64) * 2654435761 % 2**32 >> 12) % 1000
    matrix = (values.reshape(12, 12) + values.reshape(12, 12).T).astype(np.float64)
    variances, axes = principal(matrix @ np.eye(12))
    both = ordered_product(axes, axes)
    digest = hashlib.sha256(np.concatenate((variances, axes.ravel(), both.ravel(), [add(variances)])).astype("<f8").tobytes())
    assert digest.hexdigest()[:16] == "4f5bf5e51203f6c8"
