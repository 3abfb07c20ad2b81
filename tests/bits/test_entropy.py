"""Entropy coding of integers: nothing is lost, few bytes above the entropy, the same bytes everywhere, damage is found."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.bits import entropy, ids, ladder
from thinwire.bits.entropy import CLASSES, LIMIT, SYMBOLS, TOTAL, UNIT, Tables

GOLDEN = ["68961e3349d86078", "62643142809a777f", "d3f9401b31d0c240", "e7ef9f9e90f8247d"]
PRIOR = Tables.of(entropy.prior_counts())


def laplace(rows: int, width: int, mean: float, seed: int = 0) -> np.ndarray:
    """Return codes with channels and tokens of different sizes."""
    generator = np.random.default_rng(seed)
    scale = mean * np.exp(0.7 * generator.normal(size=width)) * np.exp(0.5 * generator.normal(size=(rows, 1)))
    return np.rint(generator.laplace(size=(rows, width)) * scale).astype(np.int64).clip(-LIMIT, LIMIT)


def sizes_of(codes: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(codes).mean(0) * UNIT, 1).astype(np.int64)


def made(rows: int, width: int) -> np.ndarray:
    """Return codes that any machine makes alike."""
    values = np.arange(rows * width, dtype=np.int64) * 2654435761 % 2**32
    return ((values >> 8) % 9 * ((values >> 20) % 5) - 16).reshape(rows, width)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_codes_come_back(data):
    rows, width = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 40))
    most = data.draw(st.sampled_from([0, 1, 5, 40, 1000, LIMIT]))
    codes = np.array(data.draw(st.lists(st.integers(-most, most), min_size=rows * width, max_size=rows * width))).reshape(rows, width)
    sizes = np.array(data.draw(st.lists(st.integers(1, 2**20), min_size=width, max_size=width)))
    coded = entropy.encode_codes(codes, sizes, PRIOR)
    assert np.array_equal(entropy.decode_codes(coded, rows, sizes, PRIOR), codes)


@pytest.mark.parametrize("rows", [8, 256, 1024])
@pytest.mark.parametrize("mean", [0.05, 0.3, 1.0, 4.0, 30.0])
def test_bytes_are_near_the_entropy_of_the_model(rows, mean):
    codes = laplace(rows, 32, mean)
    sizes, counts = sizes_of(codes), entropy.prior_counts()
    for _ in range(2):
        tables = Tables.of(counts)
        found = entropy.count_symbols(codes, sizes)
        ideal = float((found * tables.lengths()).sum()) / 8
        assert ideal - 1 <= len(entropy.encode_codes(codes, sizes, tables)) <= 1.03 * ideal + 8
        counts = entropy.learn_counts(counts, found)


def test_tables_learn():
    """Codes of a shape that no prior has: after a few steps they take little more than their own entropy."""
    generator = np.random.default_rng(1)
    codes = generator.choice([-3, 0, 0, 0, 3], size=(2000, 16)).astype(np.int64)
    sizes, counts = sizes_of(codes), entropy.prior_counts()
    before = len(entropy.encode_codes(codes, sizes, Tables.of(counts)))
    for _ in range(5):
        counts = entropy.learn_counts(counts, entropy.count_symbols(codes, sizes))
    share = np.array([0.2, 0.6, 0.2])
    ideal = codes.size * -(share * np.log2(share)).sum() / 8
    after = len(entropy.encode_codes(codes, sizes, Tables.of(counts)))
    assert after < 0.6 * before and after < 1.02 * ideal


def test_counts_stay_bounded_and_forget():
    counts, found = entropy.prior_counts(), np.zeros((CLASSES, SYMBOLS), dtype=np.int64)
    found[5, 31], found[5, 30] = 10**6, 10**6
    counts = entropy.learn_counts(counts, found)
    assert counts.sum(1).max() <= entropy.MEMORY
    found[5, 30] = 0
    for _ in range(8):
        counts = entropy.learn_counts(counts, found)
    assert counts[5, 30] < 0.01 * counts[5, 31]
    assert np.array_equal(counts[6], entropy.prior_counts()[6])


def test_every_symbol_can_occur_and_frequencies_sum_to_a_power_of_two():
    tables = Tables.of(np.zeros((CLASSES, SYMBOLS), dtype=np.int64))
    for each in (tables, PRIOR):
        assert each.frequencies.min() >= 1 and (each.frequencies.sum(1) == TOTAL).all()


def test_golden():
    """The same bits on every machine: tables, classes and bytes."""
    codes = made(64, 12)
    sizes, counts = np.arange(12, dtype=np.int64) * 300 + 20, entropy.prior_counts()
    tables = Tables.of(entropy.learn_counts(counts, entropy.count_symbols(codes, sizes)))
    parts = counts.astype("<i8").tobytes(), entropy.class_of_size().tobytes(), tables.frequencies.astype("<i8").tobytes()
    parts += (entropy.encode_codes(codes, sizes, tables),)
    assert [hashlib.sha256(part).hexdigest()[:16] for part in parts] == GOLDEN


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_are_codes(data):
    """No length but the declared one, no other exception, no value out of range; that they are the right ones is the frame's checksum."""
    codes = laplace(12, 8, 1.0)
    sizes = sizes_of(codes)
    coded = bytearray(entropy.encode_codes(codes, sizes, PRIOR))
    for _ in range(data.draw(st.integers(1, 4))):
        coded[data.draw(st.integers(0, len(coded) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        found = entropy.decode_codes(bytes(coded), 12, sizes, PRIOR)
        assert found.shape == (12, 8) and np.abs(found).max() <= LIMIT + 1


@pytest.mark.parametrize("cut", [1, 3, 4, 8, 16, 1000])
def test_missing_bytes_are_refused(cut):
    codes = laplace(40, 8, 1.0)
    coded = entropy.encode_codes(codes, sizes_of(codes), PRIOR)
    with pytest.raises(ValueError, match="bytes where"):
        entropy.decode_codes(coded[: max(len(coded) - cut, 0)], 40, sizes_of(codes), PRIOR)


@pytest.mark.parametrize("more", [b"\0", b"\0\0\0\0", b"\1\0\0\0", b"abcdefgh"])
def test_added_bytes_are_refused(more):
    codes = laplace(40, 8, 1.0)
    with pytest.raises(ValueError, match="bytes where"):
        entropy.decode_codes(entropy.encode_codes(codes, sizes_of(codes), PRIOR) + more, 40, sizes_of(codes), PRIOR)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 299), min_size=1, max_size=200), st.integers(0, 20))
def test_ids_come_back(found, often):
    counts = np.ones(300, dtype=np.int64)
    counts[7] += often * ids.LEARNING
    table = ids.id_table(counts)
    coded = ids.encode_ids(np.array(found), table)
    assert ids.decode_ids(coded, len(found), table).tolist() == found
    with pytest.raises(ValueError, match="bytes where"):
        ids.decode_ids(coded + b"\0\0\0\1", len(found), table)


@pytest.mark.parametrize("vocabulary", [97, 4096, 70_000])
def test_ids_take_their_entropy(vocabulary):
    generator = np.random.default_rng(0)
    share = 1 / np.arange(10, 10 + vocabulary)
    found = generator.choice(vocabulary, size=20_000, p=share / share.sum())
    counts = np.bincount(found, minlength=vocabulary)
    table = ids.id_table(1 + counts * ids.LEARNING)
    told = counts[counts > 0]
    ideal = -(told * np.log2(told / told.sum())).sum() / 8
    assert ideal < len(ids.encode_ids(found, table)) < 1.06 * ideal + 8


def test_the_ladder():
    sizes = [ladder.step_size(number) for number in range(-64, 65)]
    assert all(math.isclose(size, 2 ** (number / 32), rel_tol=2.0**-22) for number, size in zip(range(-64, 65), sizes, strict=True))
    assert all(float(np.float32(size)) == size for size in sizes)
    assert [ladder.step_size(number) for number in (-32, 0, 32)] == [0.5, 1.0, 2.0]
    assert ladder.mantissas()[:3] == (1073741824, 1097253708, 1121280435)
    for number in (ladder.LOWEST, -77, 0, 5, 1000, ladder.HIGHEST):
        assert ladder.nearest(ladder.step_size(number)) == number
    for difference in (-300, -1, 0, 1, 31, 300):
        factor, shift = ladder.step_ratio(difference)
        assert math.isclose(factor / 2**shift, 2 ** (difference / 32), rel_tol=1e-8)
