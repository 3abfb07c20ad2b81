"""How long a run still takes: by its recent steps, its validations and its time limit."""

import pytest

from thinwire.metrics.estimate import Estimate, duration


def after(estimate, spans, first=1, now=0.0, **values):
    """Let steps go by, each after its seconds; return the time."""
    for number, span in enumerate(spans):
        now += span
        estimate.note(first + number, values, now)
    return now


def test_recent_steps_count_and_not_the_first_ones():
    estimate = Estimate(1000)
    now = after(estimate, [30.0, *[1.0] * 99, *[3.0] * 20])
    assert estimate.left(now) == pytest.approx((1000 - 120) * 3.0)


def test_the_time_limit_comes_first_where_it_is_shorter():
    estimate = Estimate(1000, seconds=60.0)
    for step in range(301, 311):  # resumed after 900 s of training: the limit counts from there
        values = {"seconds": 900.0 + 2.0 * (step - 300), "tokens": step * 100, "tokens_per_second": 50.0}
        estimate.note(step, values, 2.0 * (step - 300))
    assert estimate.left(20.0) == pytest.approx(40.0)
    assert estimate.left(21.0) == pytest.approx(39.0)
    assert Estimate(1000, seconds=60.0).left(0.0) is None


def test_a_limit_that_is_never_reached_changes_nothing():
    estimate = Estimate(10, seconds=1e6)
    now = after(estimate, [1.0] * 5, seconds=1.0)
    assert estimate.left(now) == pytest.approx(5.0)


def test_after_a_replay_the_steps_that_are_done_again_are_still_to_do():
    estimate = Estimate(100)
    now = after(estimate, [1.0] * 50)
    assert estimate.left(now) == pytest.approx(50.0)
    now = after(estimate, [40.0, *[1.0] * 4], first=31, now=now)  # half a minute was lost, and 20 steps
    assert estimate.done == 35
    assert estimate.left(now) == pytest.approx(65.0)


def test_one_step_that_an_outage_made_long_does_not_count():
    estimate = Estimate(100)
    now = after(estimate, [*[1.0] * 30, 60.0, 1.0])
    assert estimate.left(now) == pytest.approx(68.0)


def test_validations_to_come_take_their_time():
    estimate = Estimate(100, validate_every=10)
    now = after(estimate, [1.0] * 9)
    estimate.note(10, {"val_loss": 5.0}, now + 6.0)  # a step of 1 s and 5 s of validation
    assert estimate.left(now + 6.0) == pytest.approx(90 * 1.0 + 9 * 5.0)  # after 20 ... 90, and the last


def test_nothing_is_left_at_the_end_or_known_at_the_start():
    estimate = Estimate(3)
    assert estimate.left(0.0) is None
    estimate.note(1, {}, 1.0)
    assert estimate.left(1.0) is None
    estimate.note(2, {}, 2.0)
    assert estimate.left(2.0) == pytest.approx(1.0)
    estimate.note(3, {}, 3.0)
    assert estimate.left(3.0) is None


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"), (90061, "25:01:01")])
def test_duration(seconds, text):
    assert duration(seconds) == text
