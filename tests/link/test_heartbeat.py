"""Signs of life, with times that the test passes in."""

from __future__ import annotations

import pytest

from thinwire.link.heartbeat import Heartbeat
from thinwire.link.options import LinkOptions

OPTIONS = LinkOptions(ping_seconds=1.0, pong_grace_seconds=1.0, silent_seconds=10.0)


def test_pings_once_per_interval_and_measures_the_round_trip():
    heart = Heartbeat(OPTIONS)
    token = heart.ping(0.0)
    assert token is not None and heart.ping(0.5) is None
    heart.heard(0.3)
    heart.pong(token, 0.3)
    assert heart.rtt == pytest.approx(0.3)
    second = heart.ping(1.0)
    heart.pong(second, 1.1)
    assert heart.rtt == pytest.approx(0.3 + 0.125 * (0.1 - 0.3))


def test_an_overdue_answer_raises_doubt_and_bytes_dispel_it():
    heart = Heartbeat(OPTIONS)
    heart.rtt = 0.5
    heart.ping(0.0)
    assert not heart.doubtful(1.4) and heart.doubtful(1.5)
    assert heart.next_at(0.9) == 1.0 and heart.next_at(1.2) == 1.0
    heart.heard(1.6)
    assert not heart.doubtful(1.7)


def test_bytes_that_arrive_put_doubt_off_but_not_the_end():
    heart = Heartbeat(OPTIONS)
    heart.ping(0.0)
    heart.moved(5.0)
    assert not heart.doubtful(5.9) and heart.doubtful(6.0)
    assert heart.silent(10.0)


def test_silence_is_counted_from_the_last_byte():
    heart = Heartbeat(OPTIONS)
    heart.heard(4.0)
    assert not heart.silent(13.9) and heart.silent(14.0)


def test_invented_answers_are_ignored():
    heart = Heartbeat(OPTIONS)
    heart.pong(7, 1.0)
    token = heart.ping(1.0)
    heart.pong(token + 1, 1.1)
    assert heart.rtt is None
