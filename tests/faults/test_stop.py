"""SIGTERM: the step under way is given up, all stages keep the same step, the exit code is 0, and a resume has the same bits."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from faults.by_hand import Hand, ended, signal_to, steps_done
from faults.inject import Fault, command_with
from faults.support import STAGES, WORDS, resumed
from patience import HANG, wait_until
from runs import train
from thinwire.checkpoint import step_of, steps
from thinwire.cli import main as cli
from thinwire.link.peer import WorkerId
from thinwire.optim.optimizers import StageOptimizer


def assert_one_step(run: Path, out: str, stages: int = STAGES) -> int:
    """All stages have written the step that was announced as the last, and nothing later."""
    step = int(re.search(r"stopped at step (\d+); kept: .*\ngo on with: thinwire train", out)[1])
    written = [[step_of(folder) for folder in steps(run) if (folder / f"stage-{stage}.json").exists()] for stage in range(stages)]
    assert [max(each) for each in written] == [step] * stages
    return step


def test_while_nothing_crosses_a_link(settings, quiet, tmp_path, capsys):
    """A step that would not end before this test is given up: one stage is cut off."""
    run = tmp_path / "run"

    def terminate() -> None:
        wait_until(lambda: (tmp_path / "struck" / "struck-1-forward-9-cut").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    words = ["--config", settings, "--run", str(run), *WORDS]
    assert command_with(words, [Fault(1, "forward", 9, "cut", 10 * HANG)], tmp_path / "struck") == 0
    assert 3 <= assert_one_step(run, capsys.readouterr().out) <= 4
    assert resumed(settings, run) == quiet()


SLOW = (
    "--pipeline.stages",
    "2",
    "--train.steps",
    "3",
    "--train.checkpoint_every",
    "0",
    "--train.validate_every",
    "0",
    "--train.threads",
    "1",
)
SLOW += ("--pipeline.microbatches", "16", "--train.batch", "256", "--codec.name", "dense", "--train.validation_sequences", "2")


@pytest.mark.full
@pytest.mark.parametrize("after", [1.0, 6.0, 11.0])
def test_over_a_link_on_which_a_step_takes_longer(settings, tmp_path, after):
    """256 sequences of 16 tokens of 32 channels in 2 bytes, 262 KB: more than 10 s at 0.2 Mbit/s."""
    run = tmp_path / "run"
    quiet = train(settings, tmp_path / "quiet", *SLOW)["weights_sha256"]
    words = ["train", "--config", settings, "--run", str(run), *SLOW, "--pipeline.mode", "workers", "--link.profile", "0.2mbps"]
    with Hand(tmp_path) as hand:
        process = hand.start(words, "train")
        wait_until(lambda: steps_done(run, 0) >= 1)
        time.sleep(after)
        signal_to(process, signal.SIGTERM)
        assert ended(process) == 0, hand.printed("train")
        assert assert_one_step(run, hand.printed("train")[0], 2) in (1, 2)
    assert train(settings, run, "--resume", *SLOW)["weights_sha256"] == quiet


LONG = ("--train.batch", "256", "--pipeline.microbatches", "64")


def test_in_one_process(settings, tmp_path):
    """A step of hundreds of sequences, one microbatch after the other."""
    run = tmp_path / "run"
    words = ("--train.steps", "3", "--train.checkpoint_every", "0", "--train.validate_every", "0", "--train.threads", "1", *LONG)
    quiet = train(settings, tmp_path / "quiet", *words)["weights_sha256"]
    with Hand(tmp_path) as hand:
        process = hand.start(["train", "--config", settings, "--run", str(run), *words], "train")
        wait_until(lambda: (run / "metrics/stage-all.jsonl").exists() and (run / "metrics/stage-all.jsonl").stat().st_size > 0)
        signal_to(process, signal.SIGTERM)
        assert ended(process) == 0, hand.printed("train")
        assert assert_one_step(run, hand.printed("train")[0], 2) in (1, 2)
    assert train(settings, run, "--resume", *words)["weights_sha256"] == quiet


def test_in_one_process_between_the_updates_of_two_stages(settings, tmp_path, monkeypatch, capsys):
    """No checkpoint was written yet: the step whose update is under way is the one that is kept."""
    run, step, updates = tmp_path / "run", StageOptimizer.step, []
    words = ("--train.steps", "5", "--train.checkpoint_every", "0", "--train.validate_every", "0")
    quiet = train(settings, tmp_path / "quiet", *words)["weights_sha256"]

    def struck(self: StageOptimizer, *given: float) -> None:
        step(self, *given)
        updates.append(self)
        if len(updates) == 5:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(StageOptimizer, "step", struck)
        assert cli.main(["train", "--config", settings, "--run", str(run), "--train.threads", "1", *words]) == 0
    assert assert_one_step(run, capsys.readouterr().out, 2) == 3
    assert train(settings, run, "--resume", *words)["weights_sha256"] == quiet


@pytest.mark.parametrize("moment", ["not found yet", "lost", "replaced"])
def test_while_a_stage_is_lost(settings, quiet, tmp_path, capsys, moment):
    """The signal comes before the supervisor finds the loss, when it has just found it, or when the other process has just begun."""
    run, fault, starts = tmp_path / "run", Fault(1, "forward", 9), []

    def told(worker_id: WorkerId, message: dict) -> None:
        starts.extend([moment] if worker_id.stage == 1 and "pid" in message else [])
        struck = (tmp_path / f"struck/struck-{fault.name}").exists()
        if {"not found yet": struck, "lost": "lost" in message, "replaced": len(starts) == 2}[moment]:
            os.kill(os.getpid(), signal.SIGTERM)

    assert command_with(["--config", settings, "--run", str(run), *WORDS], [fault], tmp_path / "struck", told) == 0
    out, error = capsys.readouterr()
    assert "stopped at step " in out and "Traceback" not in out + error
    assert resumed(settings, run) == quiet()
