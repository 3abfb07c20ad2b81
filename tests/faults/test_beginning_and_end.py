"""All killed at once: before the first checkpoint was written, after the last step, or while one of them cannot start again."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

from checkpoint.support import change_manifest
from cluster.test_join import assert_same, join_words, loopback
from faults.by_hand import Hand, ended, signal_to, steps_done
from faults.inject import Fault, train_with
from patience import wait_until
from runs import train
from thinwire.checkpoint import step_of, steps
from thinwire.cli import main as cli

WORKERS = ("--pipeline.mode", "workers")
LATE = ("--train.checkpoint_every", "0", "--train.validate_every", "0")
"""No checkpoint before the end."""
SLOW = ("--link.profile", "100mbps_10ms", "--link.reconnect_seconds", "200", "--train.steps", "30")


@pytest.mark.parametrize("mode", [("--pipeline.mode", "inprocess"), WORKERS], ids=lambda words: words[1])
@pytest.mark.parametrize("again", [("--resume",), pytest.param((), marks=pytest.mark.full)], ids=["resumed", "begun anew"])
def test_all_killed_before_the_first_checkpoint(settings, tmp_path, mode, again):
    run = tmp_path / "run"
    alone = train(settings, tmp_path / "alone", "--train.steps", "5", *LATE)
    words = ["train", "--config", settings, "--run", str(run), "--train.threads", "1", *LATE, *mode, "--train.steps"]
    with Hand(tmp_path) as hand:
        process = hand.start([*words, "100000"], "first")
        wait_until(lambda: steps_done(run, "all" if mode != WORKERS else 0) >= 2)
        signal_to(process, signal.SIGKILL)
        process.join()
        assert not steps(run)
        assert ended(hand.start([*words, "5", *again], "second")) == 0, hand.printed("second")
        notes = hand.printed("second")[1].count("training begins again at step 0")
    assert notes == len(again)
    assert json.loads((run / "summary.json").read_text())["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.parametrize("killed", [(1,), (0, 1)], ids=["one machine", "both"])
def test_machines_killed_before_the_first_checkpoint(settings, tmp_path, killed):
    """The documented command, on the machines that were lost."""
    homes = loopback(tmp_path)
    alone = train(settings, tmp_path / "alone", *LATE, "--train.steps", "30")
    words = [join_words(home, stage, settings, *LATE, *SLOW) for stage, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        running = [hand.start(each, f"stage-{stage}", hold=3 if stage == 1 else None) for stage, each in enumerate(words)]
        hand.await_hold("stage-1")
        for stage in killed:
            signal_to(running[stage], signal.SIGKILL)
            running[stage].join()
        for stage in killed:
            running[stage] = hand.start([*words[stage], "--resume"], f"stage-{stage}")
        assert [ended(process) for process in running] == [0, 0], [hand.printed(f"stage-{stage}") for stage in range(2)]
        for stage in killed:
            assert "training begins again at step 0" in hand.printed(f"stage-{stage}")[1]
    assert_same(homes[0], alone)


def test_one_that_refuses_to_start_does_not_end_the_others(settings, tmp_path):
    """Its checkpoints are those of other data: it says so, the other one waits, and both go on from the copy there."""
    homes = loopback(tmp_path)
    words = ["--train.checkpoint_every", "3", "--train.validate_every", "0"]
    alone = train(settings, tmp_path / "alone", *words, "--train.steps", "30")
    lines = [join_words(home, stage, settings, *words, *SLOW) for stage, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        other, lost = (hand.start(line, f"stage-{stage}", hold=20 if stage else None) for stage, line in enumerate(lines))
        wait_until(lambda: list(homes[0].glob("run/copies/step-*/stage-1.json")))
        signal_to(lost, signal.SIGKILL)
        lost.join()
        for path in homes[1].glob("run/checkpoints/step-*/stage-1.json"):
            change_manifest(path, data="other")
        assert ended(hand.start([*lines[1], "--resume"], "refused")) == 2
        assert "has data 'other', this run has" in hand.printed("refused")[1]
        assert other.exitcode is None
        shutil.rmtree(homes[1] / "run/checkpoints")
        again = hand.start([*lines[1], "--resume"], "again")
        assert [ended(process) for process in (other, again)] == [0, 0], [hand.printed(name) for name in ("stage-0", "again")]
        assert "replica 0 stage 1 refused to start" in hand.printed("stage-0")[1]
    assert_same(homes[0], alone)


def test_a_damaged_checkpoint_is_healed_from_the_copy(settings, tmp_path):
    """All checkpoints of a machine have another bit: after its restart they come back from the neighbour."""
    homes = loopback(tmp_path)
    words = ["--train.checkpoint_every", "3", "--train.validate_every", "0"]
    alone = train(settings, tmp_path / "alone", *words, "--train.steps", "30")
    lines = [join_words(home, stage, settings, *words, *SLOW) for stage, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        other, lost = (hand.start(line, f"stage-{stage}", hold=20 if stage else None) for stage, line in enumerate(lines))
        wait_until(lambda: list(homes[0].glob("run/copies/step-*/stage-1.json")))
        signal_to(lost, signal.SIGKILL)
        lost.join()
        for path in homes[1].glob("run/checkpoints/step-*/stage-1.safetensors"):
            good = path.read_bytes()
            path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        again = hand.start([*lines[1], "--resume"], "again")
        assert [ended(process) for process in (other, again)] == [0, 0], [hand.printed(name) for name in ("stage-0", "again")]
    assert_same(homes[0], alone)


def test_the_first_checkpoint_comes_after_the_first_steps(settings, tmp_path):
    summary = train(settings, tmp_path / "run", "--train.steps", "14", "--train.checkpoint_every", "1000")
    assert [step_of(folder) for folder in steps(tmp_path / "run")] == [10, 14]
    train(settings, tmp_path / "often", "--train.steps", "14", "--train.checkpoint_every", "7")
    assert [step_of(folder) for folder in steps(tmp_path / "often")] == [7, 14]
    assert summary["steps"] == 14


def test_or_after_a_minute_on_the_clock_of_any_stage(settings, quiet, tmp_path):
    """One stage has trained for a minute: all write the same step, and go back to it when another one is lost."""
    heard: list[tuple[int, dict]] = []
    faults = [Fault(2, "forward", 7, "minute"), Fault(1, "forward", 17, "kill")]
    words = ["--config", settings, "--run", str(tmp_path / "run"), "--pipeline.stages", "4", "--train.steps", "12", "--train.threads", "1"]
    summary = train_with([*words, "--train.checkpoint_every", "1000"], faults, tmp_path / "struck", heard)
    assert summary["weights_sha256"] == quiet()
    assert [message["restored"] for stage, message in heard if stage == 0 and "restored" in message] == [4]


@pytest.mark.parametrize("mode", [("--pipeline.mode", "inprocess"), WORKERS], ids=lambda words: words[1])
def test_all_killed_between_the_last_step_and_the_summary(settings, tmp_path, mode, capsys):
    whole = train(settings, tmp_path / "run", *mode)
    (tmp_path / "run/summary.json").unlink()
    again = train(settings, tmp_path / "run", "--resume", *mode)
    for name in ("steps", "val_loss", "final_loss", "weights_sha256", "model_sha256", "tokens"):
        assert again[name] == whole[name], name
    capsys.readouterr()
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--resume"]) == 2
    assert "is finished at step 6" in capsys.readouterr().err


def test_machines_that_ended_without_a_summary(settings, tmp_path, pool):
    from jobs import command

    homes = loopback(tmp_path)
    words = [join_words(home, stage, settings) for stage, home in enumerate(homes)]
    assert [code for code, _, _ in pool.run(command, [(each,) for each in words])] == [0, 0]
    whole = json.loads((homes[0] / "run/summary.json").read_text())
    os.unlink(homes[0] / "run/summary.json")
    results = pool.run(command, [([*each, "--resume"],) for each in words])
    assert [code for code, _, _ in results] == [0, 0], results
    assert assert_same(homes[0], whole)["val_loss"] == whole["val_loss"]
