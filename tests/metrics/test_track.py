"""Metrics file, progress line, and curves in other programs' forms."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from patience import HANG
from runs import train
from thinwire.cli import main as cli
from thinwire.cluster.join_command import parse_join
from thinwire.config.registry import TRACKERS
from thinwire.config.toml import from_toml, load_config
from thinwire.link.peer import WorkerId
from thinwire.metrics import track
from thinwire.metrics.progress import Progress
from thinwire.metrics.track import JsonLines, Tracker, scalars
from thinwire.metrics.trackers.guard import Guarded
from thinwire.metrics.trackers.open import EXTRAS, open_trackers
from thinwire.metrics.view import RunView
from thinwire.run.command import parse_train


class Clock:
    """A clock that tests move by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def run(progress, clock, steps, seconds, **values):
    for step in steps:
        clock.now += seconds
        progress.log(step, {"loss": 5.0 - step / 1000, "tokens_per_second": 1234.5, "bytes_per_token": 32.0, **values})


def test_one_object_per_line_and_flushed_at_once(tmp_path):
    path = tmp_path / "metrics" / "stage-0.jsonl"
    with JsonLines(path) as tracker:
        tracker.log(1, {"loss": 8.25, "tokens": 8192})
        tracker.log(2, {"loss": 8.0})
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"step": 1, "loss": 8.25, "tokens": 8192},
            {"step": 2, "loss": 8.0},
        ]


def test_values_become_strict_json(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as tracker:
        tracker.log(
            1, {"loss": torch.tensor(2.5), "bad": float("nan"), "worse": torch.tensor(float("inf")), "bytes": [1, {"a": 2.0}], "no": None}
        )
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "loss": 2.5, "bad": None, "worse": None, "bytes": [1, {"a": 2.0}], "no": None}


def test_resume_drops_later_and_torn_lines_and_goes_on(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as tracker:
        for step in range(1, 8):
            tracker.log(step, {"loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    with JsonLines(path, resumed=4) as tracker:
        assert steps_in(path) == [1, 2, 3, 4]
        tracker.log(5, {"loss": 2.0})
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [path]


def test_resume_without_a_file_starts_one(tmp_path):
    with JsonLines(tmp_path / "m.jsonl", resumed=4) as tracker:
        tracker.log(5, {})
    assert steps_in(tmp_path / "m.jsonl") == [5]


def test_a_failed_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as tracker:
        tracker.log(1, {})
        tracker.log(2, {})

    def no_disk(source, target):
        raise OSError("disk full")

    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))  # in order it is only cut off
    monkeypatch.setattr(track.os, "replace", no_disk)
    with pytest.raises(OSError, match="disk full"):
        track.drop_after(path, 1)
    assert steps_in(path) == [2, 1]


def test_plain_line_shows_every_value():
    out, clock = io.StringIO(), Clock()
    with Progress(1000, stream=out, clock=clock) as progress:
        run(progress, clock, [1, 2], 3.0)
    last = out.getvalue().splitlines()[-1]
    assert last == "step 2/1000  loss 4.9980  1,234 tokens/s  32.0 bytes/token  ETA 49:54"


def test_plain_lines_are_rare_but_first_and_last_are_there():
    out, clock = io.StringIO(), Clock()
    with Progress(400, stream=out, clock=clock) as progress:
        run(progress, clock, range(1, 401), 0.01)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1/400 ")
    assert lines[-1].startswith("step 400/400 ")
    assert len(lines) == 3  # 4 seconds: first, one in between, last


def test_a_run_that_stops_early_still_prints_its_last_step_once():
    out, clock = io.StringIO(), Clock()
    with Progress(400, stream=out, clock=clock) as progress:
        run(progress, clock, range(1, 8), 0.01)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/400", "7/400"]


def test_validation_is_always_printed():
    out, clock = io.StringIO(), Clock()
    with Progress(400, stream=out, clock=clock) as progress:
        run(progress, clock, [1, 2], 0.01)
        progress.log(2, {"val_loss": 4.5})
        run(progress, clock, [3], 0.01)
    lines = out.getvalue().splitlines()
    assert "validation 4.5000" in lines[1]
    assert lines[1].startswith("step 2/400 ")


def test_resumed_run_estimates_from_its_own_steps():
    out, clock = io.StringIO(), Clock()
    with Progress(400, start=300, stream=out, clock=clock) as progress:
        run(progress, clock, range(301, 311), 10.0)
    assert out.getvalue().splitlines()[-1].endswith("ETA 15:00")


def test_missing_values_are_left_out():
    out = io.StringIO()
    with Progress(5, stream=out) as progress:
        progress.log(1, {"loss": None})
    assert out.getvalue() == "step 1/5\n"


def test_a_terminal_gets_a_live_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, clock = Terminal(), Clock()
    with Progress(10, stream=out, clock=clock) as progress:
        run(progress, clock, range(1, 11), 0.01)
    assert "step 10/10" in out.getvalue()
    assert "\x1b[" in out.getvalue()


def test_nothing_is_printed_without_a_step():
    out = io.StringIO()
    with Progress(5, stream=out):
        pass
    assert out.getvalue() == ""


def test_errors_pass_through_and_close(tmp_path):
    tracker = JsonLines(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="stop"), tracker:
        raise ValueError("stop")
    assert tracker.file.closed


def test_a_tracker_must_log():
    with pytest.raises(NotImplementedError):
        Tracker().log(1, {})


def test_only_finite_numbers_are_curves():
    values = {"loss": torch.tensor(2.5), "tokens": 3, "bad": float("nan"), "name": "x", "flag": True, "several": [1], "no": None}
    assert scalars(values) == {"loss": 2.5, "tokens": 3}


# --track --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, names",
    [
        ([], ()),
        (["--track", "tensorboard"], ("tensorboard",)),
        (["--track=trackio"], ("trackio",)),
        (["--track", "trackio", "tensorboard", "trackio", "--seed", "3"], ("trackio", "tensorboard")),
    ],
)
def test_the_command_names_trackers_but_the_settings_do_not(words, names, tmp_path):
    given, without = (parse_train([*argv, "--seed", "3", "--run", str(tmp_path / "r")]) for argv in (words, []))
    assert given.track == names
    assert given.config == without.config
    joined = parse_join([str(tmp_path / "roster.toml"), "--stage", "1", "--run", str(tmp_path / "r"), *words])
    assert joined.track == names


@pytest.mark.parametrize("words, parts", [(["--track", "tensorbord"], ["tensorbord", "tensorboard, trackio"]), (["--track"], ["without"])])
def test_names_that_do_not_exist_are_refused_with_those_that_do(words, parts, tmp_path):
    with pytest.raises(ValueError) as caught:
        parse_train([*words, "--run", str(tmp_path / "r")])
    for part in (*parts, "choose from", "metrics/*.jsonl"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", TRACKERS.names())
def test_a_missing_package_is_refused_before_anything_is_made(name, config, tmp_path, monkeypatch, capsys):
    for module in (name, f"thinwire.metrics.trackers.{name}", "torch.utils.tensorboard"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, name, None)  # an import of it now fails
    assert cli.main(["train", "--config", config, "--run", str(tmp_path / "r"), "--track", name]) == 2
    message = capsys.readouterr().err
    for part in (f"--track {name}", f"needs the package {name}", f"pip install -c constraints.txt -e '.[{EXTRAS[name]}]'"):
        assert part in message
    assert not (tmp_path / "r").exists()


class Broken(Tracker):
    """Fail like a full disk, or for a reason of its own, from a step on."""

    def __init__(self, error: Exception, first: int):
        self.error, self.first, self.steps, self.closed = error, first, [], 0

    def log(self, step, values):
        self.steps.append(step)
        if step >= self.first:
            raise self.error

    def close(self):
        self.closed += 1
        raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError()])
def test_a_tracker_that_fails_is_named_once_closed_and_left_out(error, capsys):
    broken = Broken(error, first=2)
    with Guarded("curves", broken) as tracker:
        for step in range(1, 6):
            tracker.log(step, {"loss": 1.0})
    assert (broken.steps, broken.closed) == ([1, 2], 1)
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    for part in ("tracker curves", "at step 2", "switched off", type(error).__name__, "metrics/"):
        assert part in line


def test_a_tracker_that_cannot_close_is_named_and_an_interrupt_passes(capsys):
    broken = Broken(OSError("gone"), first=9)
    with pytest.raises(KeyboardInterrupt), Guarded("curves", broken):
        raise KeyboardInterrupt
    assert broken.closed == 1
    assert "tracker curves could not write its last values: OSError: gone" in capsys.readouterr().err


class Listed(Tracker):
    def __init__(self):
        self.logged = []

    def log(self, step, values):
        self.logged.append((step, dict(values)))


def test_workers_values_are_tracked_once_and_by_stage():
    seen = Listed()
    with RunView(load_config("laptop"), [seen]) as view:
        view.log(WorkerId(0, 1), 1, {"loss": 5.0, "seconds": 1.0, "wait_seconds": 0.5, "left_mbps": 2.0})
        view.log(WorkerId(0, 0), 1, {"loss": 5.0, "seconds": 1.0, "wait_seconds": 0.25})
        view.log(WorkerId(1, 1), 1, {"loss": 5.0, "wait_seconds": 0.75})
        view.log(WorkerId(0, 0), 1, {"loss": 5.0, "seconds": 9.0, "wait_seconds": 0.3})  # done again after a loss
    assert seen.logged == [
        (1, {"stage-1/wait_seconds": 0.5, "stage-1/left_mbps": 2.0}),
        (1, {"loss": 5.0, "seconds": 1.0, "wait_seconds": 0.25}),
        (1, {"replica-1-stage-1/wait_seconds": 0.75}),
    ]


def test_a_loss_is_told_with_the_steps_that_are_done_again(capsys):
    with RunView(load_config("laptop")) as view:
        view.event(WorkerId(0, 2), {"lost": "exit code -9"})
        view.event(WorkerId(0, 0), {"abandoned": 7, "epoch": 0, "why": "stage 2"})
        view.event(WorkerId(0, 0), {"restored": 4, "epoch": 1})
    said = capsys.readouterr().out
    assert "stage 2 was lost (exit code -9)" in said and "all stages go on from step 4; 3 steps are done again" in said


# TensorBoard ----------------------------------------------------------------------------------------------------------------------------

needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")


def lines_in(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics/stage-all.jsonl").read_text().splitlines()]


def curves_of(lines: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Turn lines of a metrics file into curves by name."""
    names = {name for line in lines for name in line} - {"step"}
    return {name: [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines if name in line] for name in names}


def lose_the_newest_checkpoint(run: Path) -> None:
    """Leave a run as after a crash: steps were logged that have to be done again."""
    shutil.rmtree(run / "checkpoints/step-000006")


def events_in(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def assert_events_are_the_metrics(run: Path, steps: int) -> None:
    events, lines = events_in(run), lines_in(run)
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert found == curves_of(lines)
    assert {"loss", "val_loss", "bytes_per_token", "compute_seconds"} <= found.keys()


@needs_tensorboard
def test_tensorboard_reads_what_the_metrics_file_says_also_after_a_resume(config, tmp_path):
    run = tmp_path / "r"
    train(config, run, "--track", "tensorboard")
    assert_events_are_the_metrics(run, 6)
    text = events_in(run).Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert from_toml(text.split("```")[1].removeprefix("toml")) == from_toml((run / "config.toml").read_text())
    lose_the_newest_checkpoint(run)
    words = ["train", "--run", str(run), "--resume", "--train.steps", "7", "--track", "tensorboard"]
    assert cli.main(words) == 0
    assert_events_are_the_metrics(run, 7)
    assert len(list((run / "tensorboard").iterdir())) == 2


@needs_tensorboard
def test_a_folder_that_cannot_be_written_does_not_stop_the_training(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "thinwire.metrics.trackers.tensorboard.SummaryWriter", lambda *words, **more: (tmp_path / "no/such/folder").write_text("")
    )
    summary = train(config, tmp_path / "r", "--track", "tensorboard")
    assert summary["steps"] == 6
    assert len(lines_in(tmp_path / "r")) == 6
    assert capsys.readouterr().err.count("tracker tensorboard failed at step 1 and is switched off: FileNotFoundError") == 1


@needs_tensorboard
def test_values_are_on_disk_after_an_error(tmp_path):
    def fail():
        with open_trackers(["tensorboard"], tmp_path, load_config("laptop"), resume=False) as (tracker,):
            tracker.log(1, {"loss": 2.0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [event.value for event in events_in(tmp_path).Scalars("loss")] == [2.0]


@needs_tensorboard
def test_nothing_is_made_before_the_first_step(tmp_path):
    with open_trackers(["tensorboard", "tensorboard"], tmp_path / "r", load_config("laptop"), resume=False) as trackers:
        assert len(trackers) == 1
    assert not (tmp_path / "r").exists()


# trackio --------------------------------------------------------------------------------------------------------------------------------

SILENT = """
import sys
def refuse(event, arguments):
    if event.startswith("socket.") and event not in ("socket.gethostname", "socket.__new__"):
        print("NETWORK", event, arguments, file=sys.stderr)
        raise SystemExit(77)
sys.addaudithook(refuse)
from thinwire.cli import main as cli
sys.exit(cli.main(sys.argv[1:]))
"""
READ = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
project, name = sys.argv[1:]
rows = SQLiteStorage.get_logs(project, name)
print(json.dumps({"rows": rows, "runs": len(SQLiteStorage.get_runs(project)), "config": SQLiteStorage.get_run_config(project, name)}))
"""


def python(code: str, home: Path, *words: str) -> str:
    """Run code in a process whose trackio has its home in a folder; the environment tempts it with an account and servers."""
    tempting = {"HF_TOKEN": "hf_none", "TRACKIO_SPACE_ID": "nobody/nothing", "TRACKIO_SERVER_URL": "http://127.0.0.1:9/?write_token=x"}
    environment = {**os.environ, **tempting, "TRACKIO_DIR": str(home)}
    done = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_holds_what_the_metrics_file_says_without_any_network(config, tmp_path):
    run, home = tmp_path / "curves" / "first", tmp_path / "trackio"
    python(SILENT, home, "train", "--config", config, "--run", str(run), "--train.threads", "1", "--track", "trackio")
    lose_the_newest_checkpoint(run)
    for steps in ("7", "8"):  # done again from step 5 on, then simply longer
        python(SILENT, home, "train", "--run", str(run), "--resume", "--train.steps", steps, "--track", "trackio")
        found = json.loads(python(READ, home, "curves", "first").splitlines()[-1])
        rows = [{name: value for name, value in row.items() if name != "timestamp"} for row in found["rows"]]
        assert curves_of(rows) == curves_of(lines_in(run))
        assert [row["step"] for row in rows] == list(range(1, int(steps) + 1))
        assert found["runs"] == 1
    assert found["config"]["codec.rank"] == 6
    assert (found["config"]["train.steps"], found["config"]["codec.name"]) == (8, "subspace")
