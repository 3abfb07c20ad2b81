"""A mistake in the program that every start meets again: told once, its cause last, and not five starts later."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from faults.support import WORDS
from patience import HANG
from runs import train
from thinwire.cli import main as cli
from thinwire.cluster import launch
from thinwire.cluster.membership import Membership
from thinwire.cluster.supervisor import run_workers
from thinwire.cluster.worker_process import Say
from thinwire.run.stop import Stop


def mistaken(member: Membership, say: Say, stop: Stop, **arguments: Any) -> dict[str, Any]:
    """Train, with a mistake in the forward of stage 1 at the fifth step."""
    from thinwire.model.stage import Stage

    forward = Stage.forward

    def wrong(self: Stage, ids: Any, payload: Any, context: Any) -> Any:
        if self.plan.index == 1 and context.training and context.step == 4:
            raise KeyError(f"no such thing {id(object())}")
        return forward(self, ids, payload, context)

    Stage.forward = wrong  # type: ignore[method-assign]
    return launch.train_worker(member, say, stop, **arguments)


@pytest.mark.parametrize("before", [(), ("--train.steps", "4")], ids=["in the middle", "in the first step of a resume"])
def test_the_same_exception_twice_in_one_step_ends_the_run(settings, tmp_path, capfd, before):
    resume = ["--resume"] if before else []
    if before:
        train(settings, tmp_path / "run", *WORDS, *before)

    def supervisor(task: Any, *given: Any, **options: Any) -> list[dict[str, Any]]:
        return run_workers(mistaken, *given, **options)

    with mock.patch.object(launch, "run_workers", supervisor):
        words = ["train", "--config", settings, "--run", str(tmp_path / "run"), *WORDS, "--pipeline.mode", "workers", *resume]
        assert cli.main(words) == 2
    out, error = capfd.readouterr()
    assert out.count("another process takes its place") == 1 and "KeyError" in out
    assert "thinwire: error: stage 1 failed twice in the same step, so another start would not help:" in error
    assert error.count("Traceback (most recent call last)") == 1 and "Traceback" not in out
    assert error.rstrip().splitlines()[-1].startswith("KeyError: 'no such thing")


ALONE = """
from multiprocessing import Pipe
from thinwire.cluster.worker_process import SupervisorPipe
ours, theirs = Pipe()
theirs.close()
SupervisorPipe(ours).say({"step": 1})
print("still here")
"""


def test_a_worker_whose_supervisor_has_hung_up_ends_without_a_word():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
