"""The oracle of every fault: the weights of each stage are SHA-256 equal to those of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from faults.inject import POINTS, Fault, train_with
from faults.support import LATER, STAGES, WORDS, process_figures, restored, run_with

VARIETY = {
    "four bits and drift": ("--codec.bits", "4", "--codec.drift_every", "2", "--codec.drift_rate", "0.5", "--model.dropout", "0.1"),
    "threshold": ("--codec.name", "threshold", "--codec.lifespan", "3"),
    "entropy": ("--codec.name", "anchored", "--codec.rank", "6", "--codec.entropy", "true", "--codec.rate", "1.5"),
    "learned projector": ("--codec.name", "anchored", "--codec.rank", "6", "--codec.projector", "learned", "--codec.projector_every", "2"),
}
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc to see what processes hold")


@pytest.mark.parametrize(("point", "stage"), [("forward", 2), ("backward", 1), ("optimizer", 0), ("write", 3)])
def test_a_killed_stage_changes_no_bit(settings, quiet, tmp_path, point, stage):
    hashes, heard = run_with(settings, tmp_path, [Fault(stage, point, LATER[point])])
    assert hashes == quiet()
    assert len(restored(heard)) >= 1


@pytest.mark.full
@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("point", POINTS)
def test_every_stage_at_every_point(settings, quiet, tmp_path, point, stage):
    if (point, stage) == ("backward", 0):
        pytest.skip("the first stage sends no gradient")
    assert run_with(settings, tmp_path, [Fault(stage, point, LATER[point])])[0] == quiet()


def test_stages_on_our_own_engine(settings, quiet, tmp_path):
    """Survivors give a step up in the middle, twice."""
    hashes, heard = run_with(settings, tmp_path, [Fault(1, "backward", 9), Fault(2, "forward", 23)], "--pipeline.engine", "own")
    assert hashes == quiet()
    assert len(restored(heard)) >= 2


@pytest.mark.parametrize("stages", [(1, 2), range(STAGES)], ids=["two neighbours", "all"])
def test_several_at_once(settings, quiet, tmp_path, stages):
    assert run_with(settings, tmp_path, [Fault(stage, "forward", 9) for stage in stages])[0] == quiet()


def test_a_stage_that_is_lost_before_its_first_checkpoint(settings, quiet, tmp_path):
    hashes, heard = run_with(settings, tmp_path, [Fault(1, "forward", 2)])
    assert hashes == quiet() and restored(heard)[-1] == 0


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind == "entropy" else pytest.mark.full) for kind in VARIETY])
def test_codecs_with_state(settings, quiet, tmp_path, kind):
    faults = [Fault(2, "forward", 11), Fault(0, "optimizer", 7)]
    assert run_with(settings, tmp_path, faults, *VARIETY[kind])[0] == quiet(*VARIETY[kind])


def test_a_frozen_stage_is_replaced(settings, quiet, tmp_path):
    """SIGSTOP for longer than the limit."""
    words = ("--link.silent_seconds", "3")
    hashes, heard = run_with(settings, tmp_path, [Fault(1, "forward", 9, "freeze")], *words)
    assert hashes == quiet()
    assert (1, "no sign of life for 3.0 s") in [(stage, message["lost"]) for stage, message in heard if "lost" in message]


def test_a_stage_that_dozes_is_waited_for(settings, quiet, tmp_path):
    """SIGSTOP for less than the limit: nothing happens but a delay."""
    hashes, heard = run_with(settings, tmp_path, [Fault(1, "forward", 9, "doze", 2.5)], "--link.silent_seconds", "300")
    assert hashes == quiet()
    assert not [message for _, message in heard if "lost" in message or "abandoned" in message]


class Killer(threading.Thread):
    """Kill the worker of a stage again and again, at random moments with a step or more between; note what the others hold."""

    def __init__(self, victim: int, times: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.victim, self.times, self.random = victim, times, random.Random(seed)
        self.pids: dict[int, int] = {}
        self.best = self.killed = 0
        self.held: list[dict[int, dict[str, int]]] = []
        """What the survivors (by stage; -1: the supervisor) held before each kill."""
        self.killed_pid = 0

    def hear(self, stage: int, message: dict) -> None:
        if "pid" in message:
            self.pids[stage] = message["pid"]
        if stage == self.victim:
            self.best = max(self.best, message.get("step", 0))

    def run(self) -> None:
        while self.killed < self.times:
            wanted = self.best + self.random.randrange(1, 4)
            while self.best < wanted or self.pids[self.victim] == self.killed_pid:
                time.sleep(0.01)
            time.sleep(self.random.uniform(0.0, 0.2))
            self.held.append({stage: process_figures(pid) for stage, pid in self._survivors().items()})
            self.killed_pid = self.pids[self.victim]
            with suppress(ProcessLookupError):
                os.kill(self.killed_pid, signal.SIGKILL)
                self.killed += 1

    def _survivors(self) -> dict[int, int]:
        return {-1: os.getpid()} | {stage: pid for stage, pid in self.pids.items() if stage != self.victim}


@needs_proc
@pytest.mark.full
def test_the_same_stage_twenty_times(settings, quiet, tmp_path):
    """Killed twenty times at random moments: the same bits, and the others hold no more threads, files and memory than before."""
    words = ("--train.steps", "150", "--link.profile", "100mbps_5ms")
    killer = Killer(2, 20, seed=5)
    killer.start()
    command = ["--config", settings, "--run", str(tmp_path / "run"), *WORDS, *words]
    summary = train_with(command, [], tmp_path / "struck", hear=killer.hear)
    assert summary["weights_sha256"] == quiet("--train.steps", "150")
    assert killer.killed == 20
    first, last = killer.held[2], killer.held[-1]  # the first losses load modules and grow buffers
    for stage in first:
        assert last[stage]["threads"] <= first[stage]["threads"], (stage, killer.held)
        assert last[stage]["files"] <= first[stage]["files"] + 2, (stage, killer.held)
        assert last[stage]["resident"] <= first[stage]["resident"] + 8 * 2**10, (stage, killer.held)
