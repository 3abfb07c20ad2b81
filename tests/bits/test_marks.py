"""Marks of the ids that count: there and back, their size, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.bits.marks import marks_size, pack_marks, plain_ids, unpack_marks
from thinwire.bits.targets import add_number, count_targets, mark_ids


def marked_rows(batch: int, time: int, seed: int) -> tuple[np.ndarray, torch.Tensor]:
    """Return ids and the same with random marks; the first of a row and at least one more count."""
    random = np.random.default_rng(seed)
    ids, counts = random.integers(0, 70_000, (batch, time + 1)), random.random((batch, time + 1)) < 0.3
    counts[:, 0] = counts[0, -1] = True
    marked = mark_ids(ids, counts)
    return ids, torch.from_numpy(add_number(marked, count_targets(marked) + 5))


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 99))
def test_marks_come_back(batch, time, seed):
    ids, marked = marked_rows(batch, time, seed)
    data = pack_marks(marked)
    assert len(data) == marks_size(batch, time) <= batch * time / 8 + 5
    assert torch.equal(unpack_marks(data, torch.from_numpy(ids)).long(), marked)
    assert np.array_equal(plain_ids(marked[:, :-1]).numpy(), ids)


def test_marks_of_a_microbatch_take_at_most_a_fifth_of_a_byte_per_token():
    assert all(marks_size(batch, time) <= 0.2 * batch * time for batch in range(1, 9) for time in (64, 128, 1024))


@pytest.mark.parametrize("number", [0, 1, 2**31])
def test_a_number_that_cannot_be_is_refused(number):
    ids, marked = marked_rows(2, 20, 0)
    data = pack_marks(marked)[:-4] + number.to_bytes(4, "little")
    with pytest.raises(ValueError, match=f"{number} tokens count in a batch, and"):
        unpack_marks(data, torch.from_numpy(ids))


def test_marks_of_another_length_are_refused():
    ids, marked = marked_rows(2, 20, 0)
    with pytest.raises(ValueError, match="marks of 8 bytes where 9 were declared"):
        unpack_marks(pack_marks(marked)[1:], torch.from_numpy(ids))
