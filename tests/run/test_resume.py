"""What a resume may change, forks, and one process per run folder."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from patience import HANG
from runs import train, write_config
from thinwire.checkpoint import Position, encode_manifest, remove_newer, step_of, steps, writing
from thinwire.cli import main as cli
from thinwire.config.toml import read_config
from thinwire.run import fork as forking
from thinwire.run.command import parse_train
from thinwire.util import lock
from thinwire.util.lock import LOCK_FILE, locked

WORKERS = ("--pipeline.mode", "workers")


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    assert cli.main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def history(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", [("--pipeline.mode", "inprocess"), WORKERS], ids=lambda words: words[1])
def test_data_that_has_moved(config, tmp_path, capsys, monkeypatch, mode):
    """The run was started with a path from another current folder; then the file moves; another text is refused."""
    whole = train(config, tmp_path / "whole", "--train.steps", "8", "--train.decay", "0", *mode)
    (tmp_path / "texts").mkdir()
    shutil.move(tmp_path / "text.txt", tmp_path / "texts/a.txt")
    monkeypatch.chdir(tmp_path / "texts")
    run, words = tmp_path / "run", ("--train.decay", "0", *mode)
    train(config, run, "--data.source", "a.txt", "--train.steps", "4", *words)
    monkeypatch.chdir(tmp_path)
    assert read_config(run / "config.toml").data.source == str(tmp_path / "texts/a.txt")
    (tmp_path / "b.txt").write_text((tmp_path / "texts/a.txt").read_text().replace("plus", "minus"))
    (tmp_path / "texts/a.txt").rename(tmp_path / "c.txt")
    error = refused(capsys, "--run", str(run), "--resume", "--train.steps", "8", "--data.source", "b.txt")
    assert "has data" in error and "this run has" in error
    assert read_config(run / "config.toml").data.source == str(tmp_path / "texts/a.txt")
    resumed = train(config, run, "--resume", "--data.source", "c.txt", "--train.steps", "8", *words)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert read_config(run / "config.toml").data.source == str(tmp_path / "c.txt")
    changed = {"data.source": [str(tmp_path / "texts/a.txt"), str(tmp_path / "c.txt")], "train.steps": [4, 8]}
    assert [(line["step"], line["changed"]) for line in history(run)] == [(4, changed)]


def test_rate_and_schedule_may_change_and_are_kept(config, tmp_path):
    words = ("--train.rate", "0.01", "--train.warmup", "5", "--train.decay", "0.5", "--train.steps", "7")
    runs = [tmp_path / "one", tmp_path / "other"]
    for run in runs:
        train(config, run, "--train.steps", "8")
        shutil.rmtree(run / "checkpoints/step-000008")
    summaries = [train(config, run, "--resume", *words, *mode) for run, mode in zip(runs, [(), WORKERS], strict=True)]
    assert summaries[0]["steps"] == summaries[1]["steps"] == 7
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    rates = [json.loads(line)["rate"] for line in (runs[0] / "metrics/stage-all.jsonl").read_text().splitlines()]
    assert rates[5] == 0.003 and rates[6] < 0.01 and len(rates) == 7
    kept = read_config(runs[0] / "config.toml").train
    assert (kept.rate, kept.warmup, kept.decay, kept.steps) == (0.01, 5, 0.5, 7)
    for run in runs:
        (line,) = history(run)
        assert line["step"] == 6 and line["changed"]["train.rate"] == [0.003, 0.01] and len(line["changed"]) == 4


def test_what_a_file_changes_is_kept_and_told(config, tmp_path):
    run, file = tmp_path / "run", Path(config)
    train(config, run, "--train.steps", "4")
    file.write_text(file.read_text().replace("rate = 0.003", "rate = 0.01").replace("steps = 6", "steps = 5"))
    assert train(config, run, "--resume")["steps"] == 5
    assert read_config(run / "config.toml").train.rate == 0.01
    assert [line["changed"] for line in history(run)] == [{"train.rate": [0.003, 0.01], "train.steps": [4, 5]}]


def say_everyone(folder: Path, step: int) -> None:
    """Let the parts of a checkpoint say that every worker had one of this step."""
    for path in folder.glob("stage-*.json"):
        path.write_bytes(encode_manifest(json.loads(path.read_bytes()) | {"everyone": step}))


def test_parts_of_two_trainings_never_meet(config, tmp_path):
    """Stage 1 did not write step 8; at another rate it does, and stage 0 does not: its part of the old rate must be gone by then."""
    run, straight, rate = tmp_path / "run", tmp_path / "straight", ("--train.rate", "0.01", "--train.decay", "0")
    train(config, run, "--train.steps", "8", "--train.decay", "0", *WORKERS)
    newest = run / "checkpoints/step-000008"
    shutil.copytree(newest, run / "copies/step-000008")
    for path in (*newest.glob("stage-1.*"), run / "copies/step-000008/stage-0.json", run / "copies/step-000008/stage-0.safetensors"):
        path.unlink()
    (run / "summary.json").unlink()
    shutil.copytree(run, straight)
    whole = train(config, straight, "--resume", "--train.steps", "9", *rate, *WORKERS)
    train(config, run, "--resume", "--train.steps", "7", *rate, *WORKERS)
    assert not newest.exists() and not (run / "copies/step-000008").exists()
    shutil.rmtree(run / "checkpoints/step-000007")
    (run / "summary.json").unlink()
    newest.mkdir()
    for ending in ("json", "safetensors"):
        shutil.copy(straight / f"checkpoints/step-000008/stage-1.{ending}", newest)
    resumed = train(config, run, "--resume", "--train.steps", "9", *rate, *WORKERS)
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_what_one_stage_has_goes_when_all_begin_again(config, tmp_path):
    run = tmp_path / "run"
    train(config, run, "--train.steps", "2", *WORKERS)
    for path in run.glob("checkpoints/*/stage-1.*"):
        path.unlink()
    say_everyone(run / "checkpoints/step-000002", -1)
    (run / "summary.json").unlink()
    assert train(config, run, "--resume", "--train.steps", "1", *WORKERS)["steps"] == 1
    assert [step_of(folder) for folder in steps(run)] == [1]


def test_a_full_disk_does_not_keep_newer_parts(tmp_path, monkeypatch):
    """The one that all have says so as soon as there is room; other stages' parts and other stretches are left alone."""
    from checkpoint.support import save

    for step in (2, 4):
        *_, newest = save(tmp_path, step)
    shutil.copytree(newest, tmp_path / "checkpoints/step-000004-1-0123abcd")
    older = newest.with_name("step-000002")
    say_everyone(older, -1)
    write, room = writing.write_atomic, iter([False, True, True])

    def written(path: Path, data: bytes) -> None:
        if not next(room):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(writing, "write_atomic", written)
    remove_newer(tmp_path, [0], Position(2, 0.0), {}, older)
    assert [path.name for path in sorted(newest.iterdir())] == ["stage-1.json", "stage-1.safetensors"]
    assert len(list((tmp_path / "checkpoints/step-000004-1-0123abcd").iterdir())) == 4
    assert {json.loads(path.read_bytes())["everyone"] for path in older.glob("*.json")} == {2}


@pytest.mark.parametrize("mode", [("--pipeline.mode", "inprocess"), WORKERS], ids=lambda words: words[1])
def test_a_fork_goes_on_by_itself(config, tmp_path, mode):
    whole = train(config, tmp_path / "whole", "--train.steps", "9", "--train.decay", "0")
    run, new = tmp_path / "run", tmp_path / "new"
    train(config, run, "--train.decay", "0", *mode)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert cli.main(["train", "--from", str(run), "--run", str(new), "--train.steps", "9"]) == 0
    assert json.loads((new / "summary.json").read_text())["weights_sha256"] == whole["weights_sha256"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert [step_of(folder) for folder in steps(new)][-2:] == [8, 9] and (new / "tokenizer.json").exists()
    forked, *changes = history(new)
    assert (forked["step"], forked["from"]) == (6, str(run)) and not changes
    assert cli.main(["train", "--from", str(run), "--run", str(tmp_path / "other"), "--train.rate", "0.01", "--train.steps", "9"]) == 0
    other = json.loads((tmp_path / "other/summary.json").read_text())
    assert other["steps"] == 9 and other["weights_sha256"] != whole["weights_sha256"]


def test_a_fork_of_replicas(config, tmp_path):
    words = ("--replicas.count", "2", "--train.decay", "0", *WORKERS)
    whole = train(config, tmp_path / "whole", "--train.steps", "8", *words)
    train(config, tmp_path / "run", "--train.steps", "6", *words)
    assert cli.main(["train", "--from", str(tmp_path / "run"), "--run", str(tmp_path / "new"), "--train.steps", "8"]) == 0
    assert json.loads((tmp_path / "new/summary.json").read_text())["weights_sha256"] == whole["weights_sha256"]


@pytest.fixture(scope="module")
def forkable(tmp_path_factory, token_cache) -> Path:
    """A run of two replicas."""
    folder = tmp_path_factory.mktemp("forkable")
    run = folder / "run"
    train(write_config(folder, token_cache), run, "--train.steps", "2", "--replicas.count", "2", *WORKERS)
    return run


@pytest.mark.parametrize("kind", ["killed", "full disk"])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 8, 9])
def test_a_fork_that_broke_off_can_be_made_again(forkable, tmp_path, capsys, monkeypatch, at, kind):
    """Two replicas of two stages have eight files, then come the tokenizer and the settings."""
    new, config, count = tmp_path / "new", read_config(forkable / "config.toml"), iter(range(100))
    copy, write = shutil.copyfile, forking.write_atomic

    def broken(call, *words):
        if next(count) == at:
            if kind == "full disk":
                raise OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(forking, "take_back", lambda run: None)  # so suddenly that nothing is cleared away
            patch.setattr(Path, "unlink", lambda *words, **others: None)
            raise KeyboardInterrupt
        return call(*words)

    new.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(forking.shutil, "copyfile", lambda *words: broken(copy, *words))
        patch.setattr(forking, "write_atomic", lambda *words: broken(write, *words))
        with pytest.raises(KeyboardInterrupt if kind == "killed" else ValueError, match=None if kind == "killed" else "was not copied"):
            forking.fork(forkable, new, config)
    if kind == "killed":
        assert "is half a run" in refused(capsys, "--run", str(new), "--resume")
        assert "is half a run" in refused(capsys, "--run", str(new))
    else:
        assert {path.name for path in new.iterdir()} <= {"tokenizer.json"}
    command = parse_train(["--from", str(forkable), "--run", str(new)])
    forking.fork(forkable, new, command.config)
    assert parse_train(["--run", str(new), "--resume"]).config == config
    parts = [path.relative_to(forkable) for path in forkable.rglob("step-000002/stage-*")]
    assert {path.relative_to(new) for path in new.rglob("step-*/*")} == set(parts) and len(parts) == 8
    assert [line["step"] for line in history(new)] == [2]


def test_a_fork_never_begins_at_step_0(config, tmp_path, capsys):
    """Its checkpoint is lost before the first step: all workers had it, and its parts say so."""
    train(config, tmp_path / "run", "--train.steps", "2", *WORKERS)
    say_everyone(tmp_path / "run/checkpoints/step-000002", -1)
    new = tmp_path / "new"
    new.mkdir()
    forking.fork(tmp_path / "run", new, read_config(tmp_path / "run/config.toml"))
    (new / "checkpoints/step-000002/stage-1.json").unlink()
    assert "holds no complete checkpoint" in refused(capsys, "--run", str(new), "--resume", "--train.steps", "4")


def test_a_fork_of_nothing_is_refused(config, tmp_path, capsys):
    train(config, tmp_path / "run", "--train.steps", "2")
    shutil.rmtree(tmp_path / "run/checkpoints")
    error = refused(capsys, "--from", str(tmp_path / "run"), "--run", str(tmp_path / "new"))
    assert "holds no complete checkpoint" in error and not (tmp_path / "new").exists()


def hold(run: str, ready) -> None:
    """Be another process in a run folder, until it is killed."""
    with locked(Path(run)):
        ready.set()
        multiprocessing.Event().wait()


@pytest.fixture
def holder(tmp_path):
    """Another process that has the run folder."""
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=hold, args=(str(tmp_path / "run"), ready), daemon=True)
    process.start()
    assert ready.wait(HANG)
    yield process
    process.kill()
    process.join()


@pytest.mark.parametrize("verb", ["train", "join"])
def test_one_process_per_run_folder(config, tmp_path, capsys, holder, verb):
    words = ["train", "--config", config, "--run", str(tmp_path / "run")]
    if verb == "join":
        words = ["join", str(tmp_path / "roster.toml"), "--stage", "0", *words[1:]]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert f"the run folder {tmp_path / 'run'} is in use by process {holder.pid} on " in error and "--run DIR" in error
    holder.kill()
    holder.join()
    assert (tmp_path / "run" / LOCK_FILE).exists()  # the file is left, its lock is not
    if verb == "train":
        assert cli.main(words) == 0
        assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_lock_that_is_deleted_while_it_is_asked_for(tmp_path, monkeypatch):
    """Whoever had it ends between our opening of the file and our lock on it: that file is nobody's any more."""
    run, seize, other = tmp_path / "run", lock.seize, [True]

    def late(handle: int) -> None:
        if other.pop() if other else False:
            (run / LOCK_FILE).unlink()
        seize(handle)

    monkeypatch.setattr(lock, "seize", late)
    with locked(run):
        assert (run / LOCK_FILE).exists()
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"), locked(run):
            pass
    assert not run.exists()


def test_a_place_where_nothing_can_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "cannot write to the run folder" in refused(capsys, "--run", str(tmp_path / "file" / "run"))
