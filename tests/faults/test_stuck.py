"""A worker whose computing thread is stuck: its other threads give signs of life, its neighbours wait for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from cluster.test_join import assert_same, join_words
from faults.by_hand import Hand, ended, steps_done
from faults.inject import Fault, command_with
from faults.support import WORDS, assert_struck, restored, resumed, run_with
from faults.test_by_hand import LINK, alone, homes_of  # noqa: F401
from faults.test_by_hand import WORDS as HAND_WORDS
from patience import wait_until
from thinwire.cluster.watchdog import EXIT_STUCK

LIMIT = ("--train.stuck_seconds", "8")
KINDS = ["stuck", pytest.param("stuck in C", marks=pytest.mark.full), pytest.param("stuck whole", marks=pytest.mark.full)]


@pytest.mark.parametrize("kind", ["stuck", pytest.param("stuck in C", marks=pytest.mark.full)])
def test_a_stuck_stage_is_replaced(settings, quiet, tmp_path, kind):
    """It alone: its neighbours have waited for as long as it was stuck."""
    hashes, heard = run_with(settings, tmp_path, [Fault(1, "forward", 9, kind)], *LIMIT)
    assert hashes == quiet()
    lost = [(stage, message["lost"]) for stage, message in heard if "lost" in message]
    assert [stage for stage, _ in lost] == [1], lost
    assert "is stuck: step 5 has not got on" in lost[0][1] and "(inject.py:" in lost[0][1]
    assert restored(heard)


@pytest.mark.full
def test_whoever_waits_for_a_neighbour_longer_than_the_limit_is_not_ended(settings, quiet, tmp_path):
    hashes, heard = run_with(settings, tmp_path, [Fault(1, "forward", 9, "cut", 20.0)], *LIMIT)
    assert hashes == quiet()
    assert not [message for _, message in heard if "lost" in message]


def ask_when_struck(folder: Path, fault: Fault, *numbers: int) -> None:
    """Send this process signals once the fault has struck."""

    def ask() -> None:
        wait_until(lambda: (folder / f"struck/struck-{fault.name}").exists())
        for number in numbers:
            time.sleep(0.5)
            os.kill(os.getpid(), number)

    threading.Thread(target=ask, daemon=True).start()


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_twice_ends_a_run_with_a_stuck_stage(settings, quiet, tmp_path, capfd, kind):
    run, fault = tmp_path / "run", Fault(1, "forward", 9, kind)
    ask_when_struck(tmp_path, fault, signal.SIGINT, signal.SIGINT)
    assert command_with(["--config", settings, "--run", str(run), *WORDS], [fault], tmp_path / "struck") == 130
    assert_struck(tmp_path, [fault])
    assert "Traceback" not in capfd.readouterr().err
    assert resumed(settings, run) == quiet()


@pytest.mark.parametrize("kind", KINDS)
def test_sigterm_ends_a_run_with_a_stuck_stage(settings, quiet, tmp_path, capsys, kind):
    run, fault = tmp_path / "run", Fault(1, "forward", 9, kind)
    ask_when_struck(tmp_path, fault, signal.SIGTERM)
    assert command_with(["--config", settings, "--run", str(run), *WORDS], [fault], tmp_path / "struck") == 0
    assert_struck(tmp_path, [fault])
    out, error = capsys.readouterr()
    assert "stopped at step 3; kept: " in out and "go on with: thinwire train" in out  # the last checkpoint that all stages have
    assert "stage 1 did not end by itself" in error and "Traceback" not in error
    assert kind == "stuck whole" or "(inject.py:" in error
    assert resumed(settings, run) == quiet()


@pytest.mark.parametrize("kind", ["stuck", pytest.param("stuck in C", marks=pytest.mark.full)])
def test_a_stuck_stage_without_supervisor_ends_itself(settings, alone, tmp_path, kind):  # noqa: F811
    """Nobody else is there to find out. It says where it is stuck, the others wait, and it is started again."""
    homes = homes_of(tmp_path)
    words = [join_words(home, number, settings, *HAND_WORDS, *LINK, *LIMIT) for number, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        faults = {1: [Fault(1, "forward", 15, kind)]}
        running = [hand.start(each, f"stage-{number}", faults.get(number, [])) for number, each in enumerate(words)]
        assert ended(running[1]) == EXIT_STUCK, hand.printed("stage-1")
        error = hand.printed("stage-1")[1]
        assert "thinwire: error: replica 0 stage 1 is stuck: step " in error and "(inject.py:" in error and "Traceback" not in error
        running[1] = hand.start([*words[1], "--resume"], "again")
        assert [ended(process) for process in running] == [0, 0, 0], [hand.printed(f"stage-{number}") for number in range(3)]
    assert_same(homes[0], alone)


@pytest.mark.full
def test_a_stage_that_is_stuck_with_the_lock_of_python_ends_all_the_same(settings, tmp_path):
    homes = homes_of(tmp_path)
    words = [join_words(home, number, settings, *HAND_WORDS, *LINK, "--train.stuck_seconds", "2") for number, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        faults = {1: [Fault(1, "forward", 15, "stuck whole")]}
        running = [hand.start(each, f"stage-{number}", faults.get(number, [])) for number, each in enumerate(words)]
        assert ended(running[1]) == 1, hand.printed("stage-1")
        assert "inject.py" in hand.printed("stage-1")[1]


@pytest.mark.full
def test_others_that_wait_for_a_stage_that_ended_itself_end_when_asked_to(settings, alone, tmp_path):  # noqa: F811
    """They have abandoned the step and make new links: SIGTERM and Ctrl-C end them all the same, and a resume has the same bits."""
    homes = homes_of(tmp_path)
    words = [join_words(home, number, settings, *HAND_WORDS, *LINK, *LIMIT) for number, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        faults = {1: [Fault(1, "forward", 15, "stuck")]}
        running = [hand.start(each, f"stage-{number}", faults.get(number, [])) for number, each in enumerate(words)]
        assert ended(running[1]) == EXIT_STUCK, hand.printed("stage-1")
        for number, signal_number in ((0, signal.SIGTERM), (2, signal.SIGINT)):
            os.kill(running[number].pid, signal_number)
            assert ended(running[number]) == 0, hand.printed(f"stage-{number}")
            out, error = hand.printed(f"stage-{number}")
            assert "stopped at step " in out and "Traceback" not in error
        again = [hand.start([*each, "--resume"], f"again-{number}") for number, each in enumerate(words)]
        assert [ended(process) for process in again] == [0, 0, 0], [hand.printed(f"again-{number}") for number in range(3)]
    assert_same(homes[0], alone)


@pytest.mark.parametrize(
    ("numbers", "code"), [([signal.SIGTERM], 0), ([signal.SIGINT, signal.SIGINT], 130)], ids=["SIGTERM", "Ctrl-C twice"]
)
@pytest.mark.parametrize("kind", [pytest.param("stuck", marks=pytest.mark.full), "stuck in C"])
def test_a_signal_ends_a_stuck_stage_without_supervisor(settings, tmp_path, numbers, code, kind):
    homes = homes_of(tmp_path)
    words = [join_words(home, number, settings, *HAND_WORDS, *LINK) for number, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        faults = {1: [Fault(1, "forward", 15, kind)]}
        running = [hand.start(each, f"stage-{number}", faults.get(number, [])) for number, each in enumerate(words)]
        wait_until(lambda: (tmp_path / f"stage-1.struck/struck-{faults[1][0].name}").exists())
        for number in numbers:
            os.kill(running[1].pid, number)
            time.sleep(0.5)
        assert ended(running[1]) == code, hand.printed("stage-1")
    assert steps_done(homes[1] / "run", 1) >= 1
