"""Ctrl-C: the same words whether the stages are in one process or in workers, the checkpoint before the validation, quoted paths."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patience import HANG
from runs import train
from thinwire.checkpoint import newest, steps
from thinwire.cli import main as cli
from thinwire.pipeline.inprocess import Pipeline
from thinwire.run.farewell import kept

STOPPING = "stopping after the step under way; Ctrl-C again ends at once"


class Session:
    """A training in a process group of its own, as a terminal starts it; what it prints goes to a file."""

    def __init__(self, config: str, run: Path, path: Path, *words: str) -> None:
        self.run, self.path = run, path
        line = ["train", "--config", config, "--run", str(run), "--train.threads", "1", "--train.steps", "100000", *words]
        with path.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinwire", *line], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.path.read_text()

    def hear(self, pattern: str) -> None:
        """Wait until it has said something."""
        deadline = time.monotonic() + 120
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            time.sleep(0.02)

    def press(self) -> None:
        """Press Ctrl-C: everyone in the group gets the signal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def last_words(text: str) -> list[str]:
    """Return the words of a stop, with numbers left out."""
    wanted = (STOPPING, "step N is kept in", "stopped at", "go on with", "validation loss")
    lines = [re.sub(r"\d+(\.\d+)?", "N", line) for line in text.splitlines()]
    return [line for line in lines if line.startswith(wanted)]


def stopped(config: str, folder: Path, mode: str) -> list[str]:
    run = folder / mode / "a run"  # a path that a shell would take for two
    run.parent.mkdir()
    with Session(config, run, folder / f"{mode}.txt", "--pipeline.mode", mode) as session:
        session.hear(r"step \d+/100000  loss")
        session.press()
        assert session.process.wait(HANG) == 0, session.text
    typed = re.search(r"^go on with: (.*)$", session.text, re.MULTILINE)[1]
    assert shlex.split(typed) == ["thinwire", "train", "--run", str(run), "--resume"]
    step = re.search(r"^stopped at step (\d+); kept: (.*)$", session.text, re.MULTILINE)
    assert shlex.split(step[2]) == [str(newest(run, 2))] and newest(run, 2).name == f"step-{int(step[1]):06d}"
    assert "Traceback" not in session.text
    words = shlex.split(typed)[1:]
    assert cli.main([*words, "--train.steps", "100000", "--train.seconds", "0.01"]) == 0
    return last_words(session.text.replace(str(run), "RUN"))


def test_the_words_are_the_same_in_one_process_and_in_workers(config, tmp_path, capsys):
    alone, together = (stopped(config, tmp_path, mode) for mode in ("inprocess", "workers"))
    assert alone == together
    assert [line.split(" ")[0] for line in alone] == ["stopping", "step", "validation", "stopped", "go"]
    out = capsys.readouterr().out
    assert "the time limit --train.seconds is reached" in out
    assert len(re.findall(r"step \d+ is kept in .*; validating, Ctrl-C twice leaves that out", out)) == 2


@pytest.mark.parametrize("mode", ["inprocess", "workers"])
def test_nobody_has_to_wait_for_the_validation(config, tmp_path, mode):
    """The second Ctrl-C comes during a long validation: the checkpoint is there, and what to type too."""
    run = tmp_path / "run"
    text = tmp_path / "text.txt"
    text.write_text(text.read_text() * 60)  # enough of it for a validation that takes minutes
    words = ("--pipeline.mode", mode, "--train.validation_sequences", "100000", "--train.validate_every", "0")
    with Session(config, run, tmp_path / "printed.txt", *words) as session:
        session.hear(r"step \d+/100000  loss")
        session.press()
        session.hear(r"step \d+ is kept in .*; validating, Ctrl-C leaves that out")
        session.press()
        assert session.process.wait(HANG) == 130, session.text
    step = int(re.search(r"step (\d+) is kept", session.text)[1])
    assert newest(run, 2).name == f"step-{step:06d}"
    assert f"stopped at once; kept: {newest(run, 2)}\ngo on with: thinwire train --run {run} --resume\n" in session.text
    assert "Traceback" not in session.text and not re.search("^validation loss", session.text, re.MULTILINE)


def test_a_run_that_ends_in_its_last_validation_says_how_to_go_on(config, tmp_path, monkeypatch, capsys):
    """All steps are done and kept: what a resume has left to do is the validation, and the summary."""
    run, evaluate = tmp_path / "run", Pipeline.evaluate

    def struck(self: Pipeline, *given: object) -> float:
        if given[-1] == 6:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "evaluate", struck)
        assert cli.main(["train", "--config", config, "--run", str(run), "--train.threads", "1"]) == 0
    out = capsys.readouterr().out
    assert f"stopped at step 6; kept: {newest(run, 2)}\ngo on with: thinwire train --run {run} --resume\n" in out
    assert not (run / "summary.json").exists() and "validation loss" not in out
    assert train(config, run, "--resume")["val_loss"] == train(config, tmp_path / "quiet")["val_loss"]


def test_what_is_kept_is_whole(config, tmp_path):
    """A step that only one stage, or one replica, has written is none that a resume goes on from; on a machine of several it is a part."""
    run, words = tmp_path / "run", ("--pipeline.mode", "workers", "--replicas.count", "2", "--train.batch", "8")
    train(config, run, *words)
    *_, before, last = steps(run)
    assert kept(run, 2) == f"kept: {last}"
    (run / f"replica-1/checkpoints/{last.name}/stage-1.json").unlink()
    assert kept(run, 1) == f"kept: {last}" and kept(run, 2) == f"kept: {before}"
    (last / "stage-0.json").unlink()
    assert kept(run, 1) == f"kept: {before}" and kept(run, None) == f"kept: {last} (this machine's part)"
    assert kept(tmp_path / "none", 1) == kept(tmp_path / "none", None) == "there was no checkpoint yet"
