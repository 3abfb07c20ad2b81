"""`thinwire train --pipeline.mode workers`: the same bits as in one process, clean stops, clear failures, no process left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from jobs import local_roster, train_stage
from patience import HANG, wait_until
from runs import VARIETY, train
from thinwire import checkpoint
from thinwire.cli import main as cli
from thinwire.config.registry import CODECS
from thinwire.run.command import parse_train

WORKERS = ("--pipeline.mode", "workers")
CASES = VARIETY | {"four stages": ("--pipeline.stages", "4", "--pipeline.schedule", "1f1b")}
LEARNED = "--codec.name anchored --codec.projector learned --codec.projector_every 2 --codec.ngrams 2 --codec.bits 4"
CASES |= {"learned projector": tuple(LEARNED.split()), "warm-up": ("--codec.name", "topk", "--codec.warmup", "3", "--codec.bits", "8")}
CASES |= {name: ("--codec.name", name) for name in CODECS.names() if name not in CASES}
CASES |= {"nothing, ids known": ("--codec.name", "nothing", "--codec.ngrams", "2", "--data.everywhere", "true")}
QUICK = ("subspace", "drift and dropout", "learned projector", "entropy", "entropy, ids known")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc to see the processes")


def steps_of(run: Path, stage: int) -> list[dict]:
    return [json.loads(line) for line in (run / f"metrics/stage-{stage}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CASES])
def test_workers_and_their_resume_have_the_bits_of_one_process(config, tmp_path, name):
    alone = train(config, tmp_path / "alone", *CASES[name])
    words = (*CASES[name], *WORKERS)
    together = train(config, tmp_path / "together", *words)
    assert together["model_sha256"] == alone["model_sha256"]
    assert together["weights_sha256"] == alone["weights_sha256"]
    assert together["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)
    for field in ("bytes_per_token_forward", "bytes_per_token_backward", "trainable_parameters", "compression", "steps"):
        assert together[field] == alone[field]
    shutil.rmtree(tmp_path / "together/checkpoints/step-000006")
    resumed = train(config, tmp_path / "together", "--resume", *words)
    assert resumed["steps"] == 6 and resumed["weights_sha256"] == alone["weights_sha256"]
    assert [line["step"] for line in steps_of(tmp_path / "together", 1)] == [1, 2, 3, 4, 5, 6]


def test_run_folder_of_workers(config, tmp_path):
    summary = train(config, tmp_path / "run", "--pipeline.stages", "3", *WORKERS)
    payload = (summary["bytes_per_token_forward"] + summary["bytes_per_token_backward"]) * 2 * summary["tokens"]
    assert payload < summary["framed_bytes"] < summary["socket_bytes"]
    assert len(summary["peak_rss_bytes"]) == 3 and all(peak > 2**20 for peak in summary["peak_rss_bytes"])
    metrics = [steps_of(tmp_path / "run", stage) for stage in range(3)]
    losses = [[line["loss"] for line in lines] for lines in metrics]
    assert len(losses[0]) == 6 and losses[0] == losses[1] == losses[2]
    assert len({lines[3]["val_loss"] for lines in metrics}) == 1
    assert all(line["wait_seconds"] > 0 and line["compute_seconds"] > 0 for lines in metrics for line in lines)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.toml",
        "tokenizer.json",
        "metrics",
        "checkpoints",
        "summary.json",
    }
    assert checkpoint.newest(tmp_path / "run", 3).name == "step-000006"


def test_the_time_limit_of_one_stage_stops_all(config, tmp_path):
    assert train(config, tmp_path / "run", "--train.seconds", "0.0001", *WORKERS)["steps"] == 1


def test_a_stage_that_cannot_start_is_named(config, tmp_path, capsys):
    """Only stage 0 reads the data, so only it finds out."""
    Path(tmp_path / "text.txt").write_text("too short")
    assert cli.main(["train", "--config", config, "--run", str(tmp_path / "run"), *WORKERS]) == 2
    assert "thinwire: error: stage 0: " in (error := capsys.readouterr().err) and "Traceback" not in error


def test_a_stage_that_cannot_write_its_last_checkpoint_is_named(config, tmp_path, capsys):
    """A folder stands where stage 1, and it alone, wants to write its part of the last checkpoint."""
    train(config, tmp_path / "run", "--train.steps", "4", *WORKERS)
    (tmp_path / "run/checkpoints/step-000006/stage-1.safetensors").mkdir(parents=True)
    capsys.readouterr()
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--resume", "--train.steps", "6"]) == 2
    error = capsys.readouterr().err
    assert "thinwire: error: stage 1: the checkpoint of step 6 was not written" in error and "Traceback" not in error


def test_divergence_is_told_once(config, tmp_path, capsys):
    words = ["--train.rate", "1e30", "--train.steps", "40", "--train.clip", "0", *WORKERS]
    assert cli.main(["train", "--config", config, "--run", str(tmp_path / "run"), *words]) == 2
    assert (error := capsys.readouterr().err).count("training has diverged") == 1 and "stage " in error


class Supervisor:
    """A run that does not end on its own, as a terminal starts it: in a process group and session of its own."""

    def __init__(self, config: str, run: Path) -> None:
        self.run = run
        words = ["train", "--config", config, "--run", str(run), "--train.threads", "1", "--train.steps", "100000", *WORKERS]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thinwire", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in (self.process.pid, *self.members()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def wait_for_steps(self) -> None:
        files = [self.run / f"metrics/stage-{stage}.jsonl" for stage in range(2)]
        wait_until(lambda: all(path.exists() and path.stat().st_size for path in files), alive=lambda: self.process.poll() is None)

    def members(self) -> list[int]:
        """List the processes of the session, supervisor and zombies left out."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == self.process.pid and state != "Z" and int(folder.name) != self.process.pid:
                found.append(int(folder.name))
        return found

    def worker(self, stage: int) -> int | None:
        """Find the worker of a stage by the metrics file that it holds open."""
        path = str(self.run / f"metrics/stage-{stage}.jsonl")
        for pid in self.members():
            with suppress(OSError):  # it may end, or close a file, meanwhile
                if path in [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]:
                    return pid
        return None

    def end(self) -> tuple[int, str, str]:
        out, error = self.process.communicate(timeout=HANG)
        return self.process.returncode, out, error

    def assert_alone(self) -> None:
        """Nobody of the session is left, or will be."""
        wait_until(lambda: not self.members())


@needs_proc
@pytest.mark.parametrize("number, group", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_stop_leaves_a_checkpoint_and_says_how_to_go_on(config, tmp_path, number, group):
    """Ctrl-C in a terminal reaches the whole process group; `kill` and service managers send SIGTERM to the supervisor alone."""
    with Supervisor(config, tmp_path / "run") as run:
        run.wait_for_steps()
        (os.killpg if group else os.kill)(run.process.pid, number)
        code, out, error = run.end()
        run.assert_alone()
    assert code == 0, error
    assert f"go on with: thinwire train --run {tmp_path / 'run'} --resume" in out and "Traceback" not in error
    steps = int(re.search(r"stopped at step (\d+)", out)[1])
    assert 1 <= steps < 100000 and checkpoint.newest(tmp_path / "run", 2).name == f"step-{steps:06d}"


@needs_proc
def test_a_killed_worker_is_named_and_replaced(config, tmp_path):
    with Supervisor(config, tmp_path / "run") as run:
        run.wait_for_steps()
        wait_until(lambda: run.worker(1))
        lost = run.worker(1)
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: run.worker(1) not in (None, lost), alive=lambda: run.process.poll() is None)
        os.kill(run.process.pid, signal.SIGINT)
        code, out, error = run.end()
        run.assert_alone()
    assert code == 0, error
    assert "stage 1 was lost (the worker ended without a word (exit code -9)); another process takes its place" in out
    assert re.search(r"all stages go on from step \d+", out)


@needs_proc
def test_workers_end_when_their_supervisor_is_killed(config, tmp_path):
    with Supervisor(config, tmp_path / "run") as run:
        run.wait_for_steps()
        assert len(run.members()) >= 3
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(HANG)
        run.assert_alone()


def test_fifty_resets_do_not_change_a_bit(config, tmp_path, pool, identities):
    """Every stage breaks its connections at random moments of the run; the weights are those of a quiet one."""
    words = ["--pipeline.stages", "3", "--train.steps", "40", "--train.checkpoint_every", "0", "--train.validate_every", "20"]
    quiet = train(config, tmp_path / "quiet", *words)
    command = parse_train(["--config", config, "--run", str(tmp_path / "run"), "--train.threads", "1", *words, *WORKERS])
    roster = local_roster(identities, 3)
    jobs = [(command.config, stage, roster, identities[stage], command.run, True) for stage in range(3)]
    results = pool.run(train_stage, jobs)
    assert [result["summary"]["weights_sha256"] for result in results] == [quiet["weights_sha256"]] * 3
    reconnects = [result["reconnects"][-1] for result in results[:-1]]  # of each link once, at its left end
    assert sum(reconnects) >= 50 and min(reconnects) >= 5
