"""The order of microbatches: every one forward and backward once, never more in flight than asked for, as deep as the link demands."""

from __future__ import annotations

import pytest

from thinwire.pipeline.order import compute_order
from thinwire.pipeline.schedule import depths


@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_every_microbatch_runs_forward_then_backward_once(microbatches):
    for depth in range(1, microbatches + 1):
        order = compute_order(depth, microbatches)
        assert sorted(order) == [(kind, index) for kind in "BF" for index in range(microbatches)]
        assert all(order.index(("F", index)) < order.index(("B", index)) for index in range(microbatches))
        for kind in "FB":
            assert [index for each, index in order if each == kind] == list(range(microbatches))
        in_flight, most = 0, 0
        for kind, _ in order:
            in_flight += 1 if kind == "F" else -1
            most = max(most, in_flight)
        assert most == depth and in_flight == 0


def test_without_delay_the_depth_is_that_of_1f1b():
    assert depths(4, 16) == [4, 3, 2, 1]
    assert depths(1, 16) == [1]


@pytest.mark.parametrize(
    "stages, delay, expected",
    [
        (2, 0.075, [3, 1]),  # 2 + ceil(2 * 0.075 / 0.150)
        (2, 0.076, [4, 1]),
        (2, 0.001, [3, 1]),
        (4, 0.075, [7, 5, 3, 1]),
        (4, 0.08, [10, 7, 4, 1]),
    ],
)
def test_depth_hides_the_delay(stages, delay, expected):
    """Design, section 4, with f + b = 150 ms: stage r of S keeps (S - r) and, per hop, the turns that fit a round trip."""
    assert depths(stages, 16, delay, compute=0.150) == expected


def test_depth_is_at_most_the_number_of_microbatches():
    assert depths(4, 3, delay=10.0, compute=0.1) == [3, 3, 3, 1]


def test_neighbours_never_wait_for_each_other():
    """A later stage never wants more in flight than the one before sends it: else both would wait."""
    for stages in range(1, 9):
        for delay in (0.0, 0.01, 0.5, 3.0):
            found = depths(stages, 12, delay, 0.2)
            assert found == sorted(found, reverse=True) and min(found) >= 1
