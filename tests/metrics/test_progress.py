"""What people see of a run: plain lines, and what fits a terminal of 80 or 60 columns."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from thinwire.config.toml import load_config
from thinwire.link.peer import WorkerId
from thinwire.metrics.progress import Foot, Progress
from thinwire.metrics.verdict import Verdict
from thinwire.metrics.view import RunView

STEP = {"loss": 5.1234, "tokens_per_second": 1706.0, "bytes_per_token": 66.0, "compute_seconds": 0.2, "encode_seconds": 0.01}
STEP |= {"wait_seconds": 0.6, "decode_seconds": 0.01, "seconds": 1.0}


class Clock:
    """A clock that tests move by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def drawn(progress: Progress, columns: int) -> list[str]:
    """Return what stands at the foot of a terminal of so many columns."""
    out = io.StringIO()
    Console(file=out, width=columns, color_system=None, force_terminal=True).print(Foot(progress))
    return out.getvalue().splitlines()


def run_view(stages: int = 4, replicas: int = 1, profile: str = "dsl_2mbps", steps: int = 400) -> RunView:
    config = load_config("laptop")
    config = replace(
        config,
        pipeline=replace(config.pipeline, stages=stages),
        replicas=replace(config.replicas, count=replicas),
        link=replace(config.link, profile=profile),
        train=replace(config.train, steps=steps),
    )
    view = RunView(config)
    for step in (119, 120):
        for replica in range(replicas):
            for stage in range(stages):
                rates = ({"right_mbps": 0.12} if stage < stages - 1 else {}) | ({"left_mbps": 0.11} if stage else {})
                view.log(WorkerId(replica, stage), step, STEP | rates | ({"val_loss": 5.2345} if step == 119 else {}))
    return view


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_loss_first_then_one_line_per_stage_and_nothing_is_cut(columns, replicas):
    lines = drawn(run_view(replicas=replicas).progress, columns)
    assert all(len(line.rstrip()) <= columns for line in lines)
    assert re.match(r"step 120/400  loss 5\.1234", lines[0]) and "1,706 tok" in lines[0] and "ETA" in lines[0]
    assert len(lines) == 4 + 4 * replicas  # the loss, the bar, the headings, the stages, the verdict
    for stage, line in enumerate(lines[3 : 3 + 4 * replicas]):
        assert line.startswith(f"{stage // 4}/{stage % 4}" if replicas > 1 else str(stage))
        assert "24 %" in line and "73 %" in line and ("0.12 Mb/s" in line) == (stage % 4 < 3)
    assert lines[-1].rstrip() == "bound by latency; compute 24 %, line used 6 %"
    assert ("encode" in lines[2]) == (columns >= 80) and ("validation 5.2345" in lines[0]) == (columns >= 120)


def test_the_bar_and_the_values_stay_where_they_are():
    clock = Clock()
    progress = Progress(1000, stream=io.StringIO(), clock=clock)
    starts = set()
    for step, speed in [(8, 999.0), (9, 12345.0), (10, 1000.0), (11, 9.0)]:
        clock.now += 1.0
        progress.log(step, {"loss": 5.0, "tokens_per_second": speed, "bytes_per_token": 66.0})
        text, bar = drawn(progress, 80)
        if step > 9:
            starts.add((text.index("loss"), text.index("tokens/s"), text.index("bytes/token"), text.index("ETA"), len(bar)))
    assert len(starts) == 1


def test_after_a_replay_the_step_is_the_one_that_is_done_again():
    out, clock = io.StringIO(), Clock()
    progress = Progress(400, stream=out, clock=clock)
    for step in (98, 99, 100, 91, 92):
        clock.now += 10.0
        progress.log(step, {"loss": 5.0})
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["98/400", "99/400", "100/400", "91/400", "92/400"]
    assert lines[-1].endswith("ETA 51:20")  # 308 steps of 10 s


def test_a_terminal_of_few_letters_gets_a_bar_of_those():
    raw = io.BytesIO()
    progress = Progress(4, stream=io.StringIO())
    progress.log(1, {"loss": 5.0})
    out = io.TextIOWrapper(raw, encoding="ascii")
    Console(file=out, width=60, force_terminal=True, color_system=None).print(Foot(progress))
    out.flush()
    assert b"====" in raw.getvalue() and b" 25 %" in raw.getvalue()


def note(verdict: Verdict, compute: float, mbps: float | None) -> str:
    values = {"compute_seconds": compute, "wait_seconds": 1.0 - compute, "right_mbps": mbps}
    for _ in range(3):
        verdict.note("stage", {name: value for name, value in values.items() if value is not None})
    return str(verdict)


@pytest.mark.parametrize(
    "compute, mbps, text",
    [
        (0.8, 0.1, "bound by compute; line used 5 %"),
        (0.2, 1.8, "bound by the line; line used 90 %"),
        (0.2, 0.1, "bound by latency; compute 20 %, line used 5 %"),
    ],
)
def test_the_verdict_names_what_is_busiest(compute, mbps, text):
    assert note(Verdict(2.0), compute, mbps) == text


def test_one_stage_of_several_waits_for_the_others_and_a_measured_line_counts():
    verdict = Verdict(alone=True)
    verdict.measured["stage"] = 10.0
    assert note(verdict, 0.2, 1.0) == "waiting for other stages; compute 20 %, line used 10 %"
    assert note(Verdict(alone=True), 0.9, 1.0) == "bound by compute; compute 90 %"
    assert note(Verdict(), 0.9, None) == ""  # without links there is nothing to compare


def test_plain_output_ends_with_the_verdict(capsys):
    run_view().progress.close()
    assert capsys.readouterr().out.splitlines()[-1] == "bound by latency; compute 24 %, line used 6 %"
