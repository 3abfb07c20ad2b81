"""Disks without room, for real: training goes on, says where, how much and what to do, and loses no bit of what is learnt."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGTERM

import pytest

from cluster.test_join import assert_same, join_words, loopback
from disks import fill, mounted
from faults.by_hand import Hand, ended, signal_to
from faults.inject import Fault, command_with
from faults.support import WORDS, assert_struck, resumed
from jobs import local_roster
from patience import wait_until
from runs import train, unhurried
from thinwire.checkpoint import complete, step_of
from thinwire.cli import main as cli
from thinwire.cluster.places import PLACES_FILE, Places, read_places
from thinwire.link.peer import WorkerId
from thinwire.metrics.track import JsonLines
from thinwire.run.trainer import Trainer


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as folder:
        yield folder


def be_faulty(words: list[str], faults: list[Fault], struck: Path, out: Path) -> None:
    """Type a `thinwire train` whose workers meet faults, in a process of its own: what all of them print is in one file."""
    for number in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.exit(command_with(words, faults, struck))


@pytest.mark.full
def test_full_for_a_while_and_a_stage_is_lost_meanwhile(settings, quiet, small_disk, tmp_path):
    """Full for everything that the run writes, from step 5 to step 30; metrics need more than the page they have."""
    faults = [Fault(0, "forward", 9, "fill"), Fault(1, "forward", 23, "kill"), Fault(3, "forward", 99, "empty")]
    words = ["--config", settings, "--run", str(small_disk / "run"), *WORDS, "--train.steps", "60"]
    with Hand(tmp_path) as hand:
        process = hand.context.Process(target=be_faulty, args=(words, faults, tmp_path / "struck", tmp_path / "printed"))
        process.start()
        hand.started.append(process)
        assert ended(process) == 0, (tmp_path / "printed").read_text()
    assert_struck(tmp_path, faults)
    summary = json.loads((small_disk / "run/summary.json").read_text())
    assert summary["steps"] == 60 and summary["weights_sha256"] == quiet("--train.steps", "60")
    assert (small_disk / "run/checkpoints/step-000060/stage-3.json").exists()
    lines = (tmp_path / "printed").read_text().splitlines()
    assert any("was lost" in line for line in lines)
    warnings = [line for line in lines if line.startswith("thinwire: warning: ")]
    for what in ("/metrics/stage-", "the checkpoint of step "):
        told = [line for line in warnings if what in line]
        assert told and all("No space left on device" in line and str(small_disk) in line for line in told), "\n".join(warnings)
        assert all(" KB free" in line and "make room there" in line for line in told), told


def test_full_to_the_end(settings, quiet, small_disk, tmp_path, capfd):
    """The last checkpoint is not written: an error that says what to do, and then the same bits."""
    run = small_disk / "run"
    words = ["--config", settings, "--run", str(run), *WORDS]
    assert command_with(words, [Fault(0, "forward", 9, "fill")], tmp_path / "struck") == 2
    error = capfd.readouterr().err
    told = error[error.index("thinwire: error: ") :]
    assert "the checkpoint of step 12 was not written" in told and "Traceback" not in error
    assert "make room there" in told and "--resume" in told and "tries again" not in told  # nothing comes after the last one
    assert {step_of(folder) for folder in complete(run)} <= {3} and not (run / "summary.json").exists()
    (run / "filler").unlink()
    assert resumed(settings, run) == quiet()


def test_asked_to_end_while_it_is_full(settings, small_disk, tmp_path):
    """What was written before is what counts, and the exit code is 0."""
    run = small_disk / "run"
    words = ["--train.checkpoint_every", "3", "--train.validate_every", "0", "--train.decay", "0", "--train.threads", "1", "--train.steps"]
    with Hand(tmp_path) as hand:
        process = hand.start(["train", "--config", settings, "--run", str(run), *words, "100000", "--pipeline.mode", "workers"], "train")
        wait_until(lambda: bool(complete(run)))
        fill(run)
        wait_until(lambda: "was not written" in hand.printed("train")[1])
        signal_to(process, SIGTERM)
        assert ended(process) == 0, hand.printed("train")
        assert "Traceback" not in hand.printed("train")[1]
    steps = str(max(step_of(folder) for folder in complete(run)) + 4)
    (run / "filler").unlink()
    assert resumed_to(settings, run, *words, steps) == train(settings, tmp_path / "alone", *words, steps)["weights_sha256"]


def resumed_to(settings: str, run: Path, *words: str) -> list[str]:
    """Go on to a step, in one process; return the hashes."""
    return train(settings, run, "--resume", *words)["weights_sha256"]


def test_no_room_for_the_summary(settings, small_disk, tmp_path, capfd, monkeypatch):
    run, validate = small_disk / "run", Trainer.validate

    def filling(self: Trainer) -> float:
        if self.position.step == 6:
            fill(small_disk)
        return validate(self)

    monkeypatch.setattr(Trainer, "validate", filling)
    words = ["train", "--config", settings, "--run", str(run), "--train.threads", "1"]
    with unhurried():
        assert cli.main(words) == 0
    captured = capfd.readouterr()
    assert f"{run / 'summary.json'} was not written: No space left on device" in captured.err and "then --resume" in captured.err
    assert "validation loss" in captured.out and "Traceback" not in captured.err
    (small_disk / "filler").unlink()
    monkeypatch.undo()
    assert cli.main([*words, "--resume"]) == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 6


def test_no_room_for_a_neighbours_copies(settings, tmp_path):
    """The disk on which stage 0 keeps copies for stage 1 is full: a warning there, and nothing else."""
    homes = loopback(tmp_path)
    alone = train(settings, tmp_path / "alone", "--train.steps", "12", "--train.decay", "0")
    more = ("--link.reconnect_seconds", "200", "--train.decay", "0")
    words = [join_words(home, stage, settings, *more) for stage, home in enumerate(homes)]
    with mounted(homes[0] / "full") as disk, Hand(tmp_path) as hand:
        assert [ended(each) for each in [hand.start(line, f"first-{stage}") for stage, line in enumerate(words)]] == [0, 0]
        copies = homes[0] / "run/copies"
        copies.rename(homes[0] / "copies before")
        copies.symlink_to(disk)
        fill(disk)
        longer = [[*line, "--resume", "--train.steps", "12"] for line in words]
        running = [hand.start(line, f"stage-{stage}") for stage, line in enumerate(longer)]
        assert [ended(each) for each in running] == [0, 0], [hand.printed(f"stage-{stage}") for stage in range(2)]
        error, other = (hand.printed(f"stage-{stage}")[1] for stage in range(2))
    assert "the copy of stage 1's checkpoint" in error and "make room there" in error and str(copies) in error
    assert "was not written" not in other
    assert assert_same(homes[0], alone)["steps"] == 12


def test_metrics_lose_lines_but_never_half_of_one(small_disk, capsys):
    path = small_disk / "metrics/m.jsonl"
    with JsonLines(path) as tracker:
        tracker.log(1, {"loss": 1.0})
        filler = fill(small_disk)
        for step in range(2, 200):
            tracker.log(step, {"loss": 1.0, "text": "x" * 100})
        filler.unlink()
        tracker.log(200, {"loss": 1.0})
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps[0] == 1 and steps[-1] == 200 and len(steps) < 60 and steps == sorted(set(steps))
    assert capsys.readouterr().err.count("was not written: No space left on device") == 1
    fill(small_disk)
    with JsonLines(path, resumed=1) as tracker:  # needs no room
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
        tracker.log(2, {})


def test_no_room_for_the_places(small_disk, identities, capsys):
    """Who has which place is not written down: a worker that is started again asks."""
    roster = local_roster(identities, 3, standbys=2)
    fill(small_disk)
    standby = roster.standbys[0]
    places = Places(roster, small_disk)
    places.expect(WorkerId(0, 1), standby)
    places.begin_epoch()
    assert places.worker(WorkerId(0, 1)).certificate == standby.certificate
    assert f"{small_disk / PLACES_FILE} was not written: No space left on device" in capsys.readouterr().err
    (small_disk / "filler").unlink()
    places.keep()
    assert read_places(roster, small_disk).worker(WorkerId(0, 1)).certificate == standby.certificate
