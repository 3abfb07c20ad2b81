"""What is wrong with a run's files, folders and sizes is told once, before any worker starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG
from thinwire.cli import main as cli
from thinwire.cluster import supervisor
from thinwire.config.sections import ModelConfig, RunConfig
from thinwire.run.inputs import check_folder, check_memory


@pytest.fixture
def no_workers(monkeypatch):
    """Fail if a worker is started."""

    def start(*given):
        pytest.fail("a worker was started")

    monkeypatch.setattr(supervisor.Supervisor, "start", start)


def refused(capsys, words: list[str]) -> str:
    """Run a training that cannot be; return the one line that says why."""
    assert cli.main(["train", *words, "--pipeline.mode", "workers"]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("thinwire: error: ") and printed.out == ""
    return line


@pytest.mark.parametrize(
    "words, part",
    [
        (("--data.source", "nowhere.txt"), "nowhere.txt' matches no file"),
        (("--data.source", "."), "is a folder"),
        (("--data.tokenizer", "nowhere.json"), "nowhere.json: give 'train'"),
        (("--codec.name", "subspce"), "subspce"),
        (("--data.cache", "/dev/null/cache"), "the cache /dev/null/cache cannot be written to"),
        (("--memory.folder", "/dev/null/f", "--memory.budget", "1GB"), "--memory.folder"),
    ],
)
def test_what_is_missing_is_told_once_and_before_workers_start(words, part, config, tmp_path, no_workers, capsys):
    run = tmp_path / "run"
    assert part in refused(capsys, ["--config", config, "--run", str(run), *words])
    assert not run.exists()


@pytest.mark.parametrize("name", ["text.txt/run", f"{'x' * 300}", f"{'x' * 300}/run"])
def test_a_run_folder_that_cannot_be_is_one_line(name, config, tmp_path, no_workers, capsys):
    line = refused(capsys, ["--config", config, "--run", str(tmp_path / name)])
    assert ("Not a directory" in line or "File name too long" in line) and len(line) < 500


def test_a_folder_that_can_be_made_is_not_there_afterwards(tmp_path):
    check_folder(tmp_path / "a/b/c", "run folder", "--run")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    check_folder(tmp_path / "kept", "run folder", "--run")
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"] and not list((tmp_path / "kept").iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place that is read-only for everyone, root included")
def test_a_read_only_place_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the run folder /proc/run cannot be written to: .*; choose another with --run DIR"):
        check_folder(Path("/proc/run"), "run folder", "--run")


ABSURD = {
    "train.batch": "1000000000",
    "model.width": "1000000000",
    "model.layers": str(2**64),
    "model.heads": str(10**12),
    "model.vocabulary": str(2**40),
    "model.context": str(10**10),
    "model.ffn": str(10**10),
    "train.threads": "1000000",
    "train.steps": str(10**30),
    "train.validation_sequences": str(10**12),
    "pipeline.stages": str(10**9),
    "pipeline.microbatches": str(10**9),
    "replicas.count": str(10**9),
    "link.reconnect_seconds": "1e300",
}


@pytest.mark.parametrize("word", ABSURD)
def test_sizes_that_no_machine_has_are_refused_at_once(word, config, tmp_path, no_workers, capsys):
    line = refused(capsys, ["--config", config, "--run", str(tmp_path / "run"), f"--{word}", ABSURD[word]])
    assert f"{word} is " in line and f"set --{word} to at most " in line


@pytest.mark.parametrize(
    "words, part",
    [
        (("--model.width", "1048576", "--model.ffn", "1048576", "--model.layers", "16384"), "weights; choose sizes that make at most"),
        (("--train.batch", "1048576", "--model.context", "65536"), "tokens per step; choose sizes"),
        (("--model.width", "262144", "--model.ffn", "262144", "--model.layers", "8"), "weights: what is here of them takes more than"),
    ],
)
def test_sizes_that_are_absurd_together_are_refused(words, part, config, tmp_path, no_workers, capsys):
    assert part in refused(capsys, ["--config", config, "--run", str(tmp_path / "run"), *words])


def test_one_stage_of_a_model_may_fit_where_the_whole_does_not(monkeypatch):
    monkeypatch.setattr("thinwire.run.inputs.physical_memory", lambda: 2**30)
    config = RunConfig(model=ModelConfig(width=4096, ffn=11008, heads=32, kv_heads=32, layers=8))
    check_memory(config, stages=1)
    with pytest.raises(ValueError, match=r"1,\d\d\d,\d\d\d,\d\d\d weights.*this machine has 1 GB.*--memory.budget"):
        check_memory(config, stages=None)


def run_plain(words: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "thinwire", *words], capture_output=True, env=os.environ | environment, timeout=HANG, check=False
    )


def test_output_that_knows_few_letters_gets_others_by_their_codes(config, tmp_path):
    """A path with a letter that ASCII lacks, in the words that end a run."""
    run = tmp_path / "läufe" / "eins"
    words = ["train", "--config", config, "--run", str(run), "--train.threads", "1", "--train.steps", "1"]
    done = run_plain(words, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"l\\xe4ufe/eins" in done.stdout and b"Traceback" not in done.stderr


def test_an_error_of_the_system_is_one_line(monkeypatch, capsys):
    def fail(argv):
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setitem(cli.VERBS, "train", ("", "thinwire.cli.train:main"))
    monkeypatch.setattr("thinwire.cli.train.main", fail)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "thinwire: error: some/file: Permission denied\n"
