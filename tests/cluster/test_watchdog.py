"""How long a calculation may take: judged by those before it, whatever the clock says."""

from __future__ import annotations

import operator
import os
import signal
import threading
from collections import deque
from functools import partial

import pytest

from patience import HANG
from thinwire.cluster.watchdog import FACTOR, NEW_FACTOR, STOP_SECONDS, Patience, where_is
from thinwire.run.stop import Stop


def watched(patience: Patience, doing: str, step: int, seconds: int, *, waiting: bool = False, seen: int = 0) -> bool:
    """Let a calculation take so many seconds, a look each; tell whether it was stuck at any of them."""
    stuck = False
    for _ in range(seconds + 1):
        patience.look(doing, step, seen, 1.0, waiting=waiting)
        stuck = stuck or patience.streak > patience.limit
    return stuck


def test_a_calculation_without_end_is_stuck():
    patience = Patience(60)
    assert not watched(patience, "first steps", 0, 2)
    assert not watched(patience, "step", 2, 60)
    assert watched(patience, "step", 2, 1)


def test_steps_that_take_long_may_take_long():
    """Calculations of 30 s: one of 500 s may still come to its end, one of 700 s not."""
    patience = Patience(60)
    assert not watched(patience, "first steps", 0, 30)
    assert patience.limit == max(60, NEW_FACTOR * 60)
    for step in (2, 3, 4):
        assert not watched(patience, "step", step, 30)
    assert not watched(patience, "step", 5, 500)
    assert watched(patience, "step", 6, int(FACTOR * 500) + 1)


def test_the_first_steps_may_take_ten_times_as_long():
    assert not watched(Patience(60), "first steps", 0, 600)
    assert watched(Patience(60), "first steps", 0, 601)


def test_the_first_steps_may_take_long_where_a_microbatch_does():
    patience = Patience(60)
    patience.expected = 100.0
    assert not watched(patience, "first steps", 0, 2000)


def test_one_slow_moment_is_forgotten():
    patience = Patience(60)
    assert not watched(patience, "first steps", 0, 1)
    assert not watched(patience, "step", 2, 50)
    watched(patience, "step", 3, 0)
    assert patience.limit > 900
    for step in range(4, 200):
        watched(patience, "step", step, 1)
    assert patience.limit == 60


def test_whoever_waits_for_a_neighbour_is_not_stuck():
    patience = Patience(60)
    assert not watched(patience, "step", 2, 10_000, waiting=True)
    assert patience.streak == 0 and patience.limit == 60


def test_every_frame_and_every_run_of_the_engine_is_progress():
    patience = Patience(60)
    assert not any(watched(patience, "step", 2, 59, seen=number) for number in range(100))


def test_a_new_kind_of_calculation_may_take_longer_than_those_that_were_measured():
    patience = Patience(60)
    watched(patience, "step", 2, 1)
    assert not watched(patience, "validation", 3, 600)


def test_who_is_asked_to_end_may_finish_a_calculation_as_long_as_those_before():
    patience = Patience(60)
    assert patience.end_limit == STOP_SECONDS
    watched(patience, "step", 2, 30)
    watched(patience, "step", 3, 1)
    assert patience.end_limit == 60


def test_the_place_of_a_thread_names_the_innermost_call_first():
    reached, release = threading.Event(), threading.Event()

    def rest() -> None:
        reached.set()
        release.wait()

    thread = threading.Thread(target=rest)
    thread.start()
    try:
        assert reached.wait(HANG)
        assert " <- rest (test_watchdog.py:" in where_is(thread.ident)
    finally:
        release.set()
        thread.join()


def test_a_signal_that_comes_in_a_long_calculation_counts_once():
    """The main thread is in C when Ctrl-C is pressed: the watchdog takes note of it, and later the handler hears of the same one."""
    stop, gate, (reading, writing) = Stop(), threading.Lock(), os.pipe()

    def press() -> None:
        gate.acquire()
        signal.raise_signal(signal.SIGINT)
        stop.catch_up()
        os.write(writing, b"1" if stop.asked else b"0")

    gate.acquire()
    with stop.listening():
        thread = threading.Thread(target=press)
        thread.start()
        try:
            (_, noted) = deque(map(operator.call, (gate.release, partial(os.read, reading, 1))))  # Python runs no handler between the two
        except KeyboardInterrupt:
            pytest.fail("one Ctrl-C counted as two")
        thread.join()
        assert noted == b"1" and stop.asked and not stop.at_once
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    os.close(reading)
    os.close(writing)
