"""Without a supervisor: workers that people started one by one, killed, started again, frozen and taken over."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest

from cluster.test_join import assert_same, join_words, machines
from faults.by_hand import Hand, ended, signal_to, steps_done
from jobs import local_roster, run_config
from patience import wait_until
from runs import train
from thinwire.cluster.neighbours import Neighbours
from thinwire.cluster.places import Places
from thinwire.cluster.scratch import free_ports
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import Abort, Replaced
from thinwire.link.peer import WorkerId

STEPS = 40
WORDS = ("--pipeline.stages", "3", "--train.steps", str(STEPS), "--train.checkpoint_every", "3")
LINK = ("--link.profile", "100mbps_10ms", "--link.silent_seconds", "2", "--link.reconnect_seconds", "300")
HOLD = 6
"""The step before which the one that is to be lost stands still."""


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory) -> dict:
    return train(settings, tmp_path_factory.mktemp("alone") / "run", *WORDS)


def homes_of(folder: Path) -> list[Path]:
    """Make three machines, of which the last only dials out."""
    return machines(folder, [*(f"127.0.0.1:{port}" for port in free_ports(2)), "none"])


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full)])
def test_a_killed_stage_is_started_again_by_hand(settings, alone, tmp_path, stage):
    homes = homes_of(tmp_path)
    words = [join_words(home, number, settings, *WORDS, *LINK) for number, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        running = [hand.start(each, f"stage-{number}", hold=HOLD if number == stage else None) for number, each in enumerate(words)]
        hand.await_hold(f"stage-{stage}")
        signal_to(running[stage], signal.SIGKILL)
        running[stage].join()
        running[stage] = hand.start([*words[stage], "--resume"], f"stage-{stage}-again")
        codes = [ended(process) for process in running]
        assert codes == [0, 0, 0], [hand.printed(f"stage-{number}") for number in range(3)]
    assert_same(homes[0], alone)


def test_the_place_of_a_frozen_stage_is_taken(settings, alone, tmp_path):
    """The frozen process wakes up after another has taken its place: it ends and says so, and there is no double stage."""
    homes = homes_of(tmp_path)
    words = [join_words(home, number, settings, *WORDS, *LINK) for number, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        first, second, old = (hand.start(each, f"stage-{number}", hold=HOLD if number == 2 else None) for number, each in enumerate(words))
        hand.await_hold("stage-2")
        signal_to(old, signal.SIGSTOP)
        hand.let_go("stage-2")
        spare = tmp_path / "spare"
        shutil.copytree(homes[2], spare)
        new = hand.start([*join_words(spare, 2, settings, *WORDS, *LINK), "--resume"], "new")
        before = steps_done(spare / "run", 2)
        wait_until(lambda: steps_done(spare / "run", 2) > before + 1)
        signal_to(old, signal.SIGCONT)
        assert ended(old) == 2
        error = hand.printed("stage-2")[1]
        assert "a newer process has taken the place of this one" in error and "Traceback" not in error, error
        assert [ended(process) for process in (first, second, new)] == [0, 0, 0], hand.printed("new")
    assert_same(homes[0], alone)


def test_only_the_old_process_is_told_that_it_was_replaced(identities):
    """A stage in the middle learns on one side that it was replaced: whoever is on its other side is not."""
    neighbours = Neighbours(
        run_config(3, "auto", {"name": "dense"}), Places(local_roster(identities, 3)), Endpoint(identities[1]), WorkerId(0, 1), "test"
    )
    neighbours.opened[WorkerId(0, 2)] = mock.Mock()
    neighbours._pass_on(WorkerId(0, 0), Replaced("a newer process has taken the place of this one"))
    _, code = neighbours.opened[WorkerId(0, 2)].abort.call_args.args
    assert code is Abort.RECOVERING
