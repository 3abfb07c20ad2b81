"""`thinwire memory`: the words, what is printed, the picture, and what is refused. Profiles are made up: nothing is measured here."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
from rich.console import Console

from memory.made import UNIT, equal
from thinwire.cli import main as cli
from thinwire.cli.memory import parse_memory, report, wanted_depth
from thinwire.memory.plan import compare_strategies
from thinwire.memory.show import kinds, memory_bar, sentence, time_line
from thinwire.memory.simulate import simulate

FIXED = {"parameters": 500, "gradients": 300, "optimizer": 150, "basis and fixed table": 50}
PROFILE = dataclasses.replace(equal(0.34, blocks=6, microbatches=2), fixed_bytes=1000, payload_bytes=10, kinds=FIXED)
BUDGET = "4.1KB"


@pytest.fixture
def seen(monkeypatch) -> list:
    """Give every stage the made profile; collect for which stage and settings it was asked."""
    calls = []
    module = types.ModuleType("thinwire.memory.measure")
    module.profile_stage = lambda config, index, device: calls.append((config, index)) or PROFILE
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("COLUMNS", "100")
    return calls


def run(*words: str) -> int:
    return cli.main(["memory", "--pipeline.mode", "inprocess", *words])


def test_the_plan_is_printed_with_peak_and_slow_down(seen, capsys):
    assert run("--config", "small", "--stage", "2", "--memory.budget", BUDGET, "--pipeline.stages", "4") == 0
    ((config, index),) = seen
    assert (config.pipeline.stages, config.memory.budget, index) == (4, BUDGET, 2)
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("Stage 2 of 4", "budget 4.1KB", "recompute", "wire buffers", "gradients", "does not fit", "Time line of 2 microbatches"):
        assert part in printed
    plan = compare_strategies(PROFILE, 4100)["hybrid"]
    assert sentence(plan, 4100) in printed and f"slow-down {plan.seconds / plan.ideal_seconds:.2f}x" in printed
    assert "smallest budget is 2.01 KB" in printed


def test_without_a_budget_everything_is_kept(seen, capsys):
    assert run() == 0
    assert "6 blocks: 6 kept" in " ".join(capsys.readouterr().out.split())


def test_a_budget_below_the_minimum_is_refused_with_it(seen, capsys):
    assert run("--memory.budget", "2.0KB") == 2
    assert "needs at least 2.01 KB" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn_and_always_the_same(seen, capsys, tmp_path, ending):
    pytest.importorskip("matplotlib")
    files = [tmp_path / "deep" / f"{name}.{ending}" for name in "ab"]
    for file in files:
        assert run("--memory.budget", BUDGET, "--picture", str(file)) == 0
    first, second = (file.read_bytes() for file in files)
    assert first == second and len(first) > 5000
    assert f"picture: {files[1]}" in capsys.readouterr().out.replace("\n", "")


def test_without_matplotlib_the_rest_is_printed(seen, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--memory.budget", BUDGET, "--picture", str(tmp_path / "a.png")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "no picture: matplotlib is not installed; in the checkout: pip install -c constraints.txt -e '.[plot]'" in printed
        and "Time line" in printed
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, part",
    [
        ("--stage 4 --pipeline.stages 4", "the stages are 0 to 3"),
        ("--stage -1", "--stage is -1"),
        ("--memory.budget 2Gb/s", "memory.budget is '2Gb/s'; give a number and a unit"),
        ("--memory.bugdet 2GB", "did you mean --memory.budget?"),
        ("--memory.budget 2GB --pipeline.mode workers --pipeline.schedule gpipe", "leave --pipeline.schedule at auto"),
        ("--picture plan.txt", "ends in .png or .svg"),
        ("--run runs/first", "--run is not for thinwire memory"),
        ("--resume", "--config RUN/config.toml"),
        ("--config tiny", "there is no config 'tiny'"),
    ],
)
def test_what_cannot_be_meant_is_refused(seen, capsys, words, part):
    assert run(*words.split()) == 2
    assert part in capsys.readouterr().err and not seen


def test_help_lists_the_words_of_the_verb(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["memory", "--help"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("--stage", "--picture", "--memory.budget", "--config"))


def test_the_wanted_depth_is_the_pipelines():
    def depth(*words: str) -> int:
        command = parse_memory(["--config", "small", "--pipeline.stages", "4", *words])
        return wanted_depth(command.config, command.stage, PROFILE)

    workers = ("--pipeline.mode", "workers")
    assert depth("--pipeline.mode", "inprocess") == 1
    assert [depth(*workers, "--stage", str(stage)) for stage in range(4)] == [4, 3, 2, 1]
    assert depth(*workers, "--pipeline.schedule", "gpipe") == 8
    assert [depth(*workers, "--pipeline.schedule", "1f1b", "--stage", str(stage)) for stage in range(4)] == [7, 5, 3, 1]
    assert depth(*workers, "--link.profile", "1000mbps_10000ms", "--stage", "1") == 3 + 2 * 2  # a microbatch takes 18 s, a round trip 20 s


def test_kinds_add_up_to_the_peak():
    plan = compare_strategies(PROFILE, 4100)["hybrid"]
    parts = kinds(PROFILE, plan)
    assert sum(parts.values()) == plan.peak_bytes and parts["wire buffers"] == 10 * plan.in_flight
    unnamed = dataclasses.replace(PROFILE, kinds={"parameters": 400})
    assert kinds(unnamed, plan)["other"] == 600


def test_the_time_line_has_a_letter_for_every_moment():
    line = simulate(equal(0.5, blocks=4), ("offload", "recompute", "keep", "keep"), 1, 3 * UNIT)
    compute, out, back, memory = time_line(line, 3 * UNIT, 52).plain.splitlines()[2:6]
    # Four letters a unit: F 0-4, B3 4-6, B2 6-8, R1 8-9, B1 9-11, B0 11-13; out 1-3; in when there is space beside the recompute.
    assert compute.split()[1] == "F" * 16 + "B" * 16 + "R" * 4 + "B" * 16
    assert out.split()[-1] == "·" * 4 + "o" * 8 + "·" * 40
    assert back.split()[-1].count("i") == 8 and set(back.split()[-1]) == {"·", "i"}
    assert memory.split()[1][16] == "█" and len(memory.split()[1]) == 52
    assert memory_bar(line, 30 * UNIT, 52).strip(" ▁") == ""


def test_a_profile_whose_pieces_are_tiny_is_shown_too():
    profile = dataclasses.replace(PROFILE, blocks=tuple(dataclasses.replace(block, forward_seconds=1e-9) for block in PROFILE.blocks))
    console = Console(width=40, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report(parse_memory(["--config", "small", "--memory.budget", BUDGET]), profile, console)
    assert "Time line" in console.export_text()
