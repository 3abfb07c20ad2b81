"""Metrics file and progress line."""

import io
import json

import pytest
import torch

from thinwire import track
from thinwire.track import JsonLines, Progress, Tracker, duration


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

    monkeypatch.setattr(track.os, "replace", no_disk)
    with pytest.raises(OSError, match="disk full"):
        JsonLines(path, resumed=1)
    assert steps_in(path) == [1, 2]


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


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"), (90061, "25:01:01")])
def test_duration(seconds, text):
    assert duration(seconds) == text
