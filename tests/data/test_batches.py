"""Windows, their seeded order, and the global sample index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data.batches import Batches, Windows, permute
from thinwire.data.stream import TokenStream, clip, inspect


def stream_of(*lengths: int, vocabulary: int = 100_000) -> TokenStream:
    """Make a stream of 0, 1, 2, ... cut into pieces."""
    pieces, first = [], 0
    for number, length in enumerate(lengths):
        pieces.append((Path(f"piece-{number}"), np.arange(first, first + length, dtype=np.uint32)))
        first += length
    return TokenStream(pieces, vocabulary)


@given(size=st.integers(1, 3000), key=st.text(max_size=8))
@settings(max_examples=25, deadline=None)
def test_permutation_is_a_bijection(size: int, key: str) -> None:
    assert sorted(permute(position, size, key) for position in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257])
def test_permutation_is_a_bijection_at_powers_of_two(size: int) -> None:
    assert sorted(permute(position, size, "0/0") for position in range(size)) == list(range(size))


@given(position=st.integers(0, 10**12 - 1))
@settings(max_examples=20, deadline=None)
def test_permutation_stays_inside_a_large_range(position: int) -> None:
    assert 0 <= permute(position, 10**12, "0/0") < 10**12


def test_permutation_mixes() -> None:
    order = np.array([permute(position, 4000, "0/0") for position in range(4000)])
    assert abs(np.corrcoef(np.arange(4000), order)[0, 1]) < 0.06
    # neighbours that stay neighbours: 2 expected of a random permutation
    assert (np.abs(np.diff(order)) == 1).sum() < 15
    for parts in (2, 3, 8):  # no residue class keeps together
        kept = (order % parts == np.arange(4000) % parts).mean()
        assert abs(kept - 1 / parts) < 0.04, parts


def test_permutation_of_three_reaches_all_orders() -> None:
    orders = {tuple(permute(position, 3, f"{seed}/0") for position in range(3)) for seed in range(100)}
    assert len(orders) == 6


def test_an_epoch_holds_every_window_once() -> None:
    batches = Batches(Windows(stream_of(101), 10, "text"), seed=3)
    assert len(batches) == 10
    for epoch in range(3):
        firsts = sorted(int(batches.sample(epoch * 10 + index)[0]) for index in range(10))
        assert firsts == list(range(0, 100, 10))


def test_windows_overlap_by_the_target_token() -> None:
    windows = Windows(stream_of(101), 10, "text")
    assert windows.read(0).tolist() == list(range(11))
    assert windows.read(9).tolist() == list(range(90, 101))


def test_the_last_window_needs_its_target() -> None:
    assert len(Windows(stream_of(100), 10, "text")) == 9
    assert len(Windows(stream_of(11), 10, "text")) == 1


def test_order_depends_on_seed_and_epoch_alone() -> None:
    windows = Windows(stream_of(1001), 10, "text")
    first, again, other = Batches(windows, 1), Batches(windows, 1), Batches(windows, 2)
    assert np.array_equal(first.batch(0, 100), again.batch(0, 100))
    assert not np.array_equal(first.batch(0, 100), other.batch(0, 100))
    assert not np.array_equal(first.batch(0, 100), first.batch(100, 100))


def test_a_batch_is_its_samples_however_it_is_cut() -> None:
    batches = Batches(Windows(stream_of(57, 44), 10, "text"), seed=0)
    whole = batches.batch(5, 12)  # crosses an epoch
    assert whole.shape == (12, 11)
    assert whole.dtype == np.int64
    assert np.array_equal(whole, np.concatenate([batches.batch(5, 4), batches.batch(9, 8)]))
    assert np.array_equal(whole[3], batches.sample(8))


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_stream_in_pieces_reads_as_one(lengths: list[int], data: st.DataObject) -> None:
    stream, total = stream_of(*lengths), sum(lengths)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert len(stream) == total
    assert stream.read(start, stop - start).tolist() == list(range(start, stop))
    clipped = TokenStream(clip(stream.pieces, start, stop), 100_000)
    assert clipped.read(0, len(clipped)).tolist() == list(range(start, stop))


def test_validation_is_evenly_spaced_in_order_and_repeatable() -> None:
    windows = Windows(stream_of(1001), 10, "text")
    ids_BT = windows.evenly(4)
    assert ids_BT[:, 0].tolist() == [0, 250, 500, 750]
    assert ids_BT.dtype == np.int64
    assert np.array_equal(ids_BT, windows.evenly(4))
    assert windows.evenly(1000).shape == (100, 11)
    assert windows.evenly(100)[:, 0].tolist() == list(range(0, 1000, 10))
    with pytest.raises(ValueError, match="at least 1"):
        windows.evenly(0)


def test_a_stream_too_short_for_one_sequence_is_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"notes: 10 tokens found.* needs 11 .*--model\.context"):
        Windows(stream_of(10), 10, "notes")


def test_an_id_outside_the_vocabulary_is_caught_when_handed_out() -> None:
    stream = stream_of(50, 51, vocabulary=90)
    assert stream.read(80, 10).tolist() == list(range(80, 90))
    with pytest.raises(ValueError, match=r"piece-1 holds token id 90, but model\.vocabulary is 90: set --model\.vocabulary to at least 91"):
        stream.read(80, 11)


def test_inspection_of_a_large_piece_reads_both_ends_and_part_of_the_middle() -> None:
    tokens_N = np.zeros(5_000_000, dtype=np.uint16)
    before = inspect(TokenStream([(Path("shard"), tokens_N)], 10))
    tokens_N[-1] = 1
    assert inspect(TokenStream([(Path("shard"), tokens_N)], 10)) != before
    tokens_N[-1], tokens_N[0] = 0, 77
    with pytest.raises(ValueError, match="token id 77"):
        inspect(TokenStream([(Path("shard"), tokens_N)], 10))
