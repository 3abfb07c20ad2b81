"""`thinwire train --memory.budget`: the weights of the plain run, within the budget, in one process and in workers; a disk that fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.inject import Fault
from memory.forced import full_disk, train_forced
from patience import HANG
from runs import train, write_config
from thinwire.cli import main as cli
from thinwire.memory.blocks import Plan

LONG = ("--model.layers", "9", "--model.context", "64", "--model.ffn", "256", "--train.batch", "24", "--train.steps", "3")
ONE = (*LONG, "--pipeline.stages", "1", "--codec.name", "dense")
FOUR = ("--model.layers", "8", "--pipeline.stages", "4", "--pipeline.microbatches", "4", "--train.steps", "4")
KINDS = {"parameters", "gradients", "optimizer", "activations", "wire_buffers", "basis_and_fixed_table", "working_memory"}
PLANNED = {"peak", "budget", "planned_peak", "choices", "in_flight", "optimizer_out"}
POISON = """
import sys


class Poison:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "thinwire.memory" or name.startswith("thinwire.memory."):
            raise RuntimeError(f"{name} is poisoned")


sys.meta_path.insert(0, Poison)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory, token_cache) -> str:
    return write_config(tmp_path_factory.mktemp("budget"), token_cache)


@pytest.fixture(scope="module")
def plain(config, tmp_path_factory) -> Callable[..., dict]:
    """Return a function that gives the summary of a run without a budget, in one process."""
    known: dict[tuple[str, ...], dict] = {}

    def summary(*words: str) -> dict:
        if words not in known:
            known[words] = train(config, tmp_path_factory.mktemp("plain") / "run", *words)
        return known[words]

    return summary


@pytest.mark.parametrize("mode", [pytest.param("inprocess", marks=pytest.mark.full), "workers"])
def test_without_a_budget_nothing_of_it_is_imported(config, tmp_path, mode):
    """Every process of the run refuses to import any of it, and the run does not notice."""
    (tmp_path / "sitecustomize.py").write_text(POISON)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    program = [sys.executable, "-m", "thinwire", "train", "--config", config, "--train.threads", "1", "--pipeline.mode", mode]

    def run(name: str, *words: str) -> subprocess.CompletedProcess:
        command = [*program, "--run", str(tmp_path / name), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)

    ended = run("run")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["memory"] == [None, None]
    refused = run("refused", "--memory.budget", "1GB")
    assert refused.returncode != 0 and "poisoned" in refused.stderr  # it would have been noticed


def test_every_kind_is_counted(config, tmp_path):
    summary = train(config, tmp_path / "run", "--memory.budget", "1TB")
    assert len(summary["memory"]) == 2
    for stage in summary["memory"]:
        assert set(stage) == {*KINDS, *PLANNED} and stage["budget"] == 10**12 and set(stage["choices"]) == {"keep"}
        assert stage["peak"] == sum(stage[kind] for kind in KINDS)
        assert 0 < stage["parameters"] == stage["gradients"] < stage["optimizer"] * 1.2 and stage["activations"] > 0


def test_a_stage_of_three_times_the_budget_trains(config, plain, tmp_path):
    usual = plain(*ONE)
    (kept,) = train(config, tmp_path / "kept", *ONE, "--memory.budget", "1TB")["memory"]
    whole = kept["peak"] - kept["working_memory"]
    tight = train(config, tmp_path / "tight", *ONE, "--memory.budget", f"{whole // 3}B")
    assert tight["weights_sha256"] == usual["weights_sha256"]
    (memory,) = tight["memory"]
    assert memory["peak"] <= memory["planned_peak"] <= memory["budget"] == whole // 3
    assert memory["activations"] < kept["activations"] / 3
    assert {"recompute", "offload"} & set(memory["choices"])
    assert not [path.name for path in (tmp_path / "tight").iterdir() if path.name.startswith(".")]


def test_a_budget_below_the_minimum_is_refused_with_the_minimum(config, tmp_path, capsys):
    words = ["train", "--config", config, "--run", str(tmp_path / "run"), "--train.threads", "1", *ONE]
    assert cli.main([*words, "--memory.budget", "100KB"]) == 2
    said = capsys.readouterr().err
    found = re.search(r"needs at least .*--memory\.budget (?:to )?([\d.]+) ?([KMG]B)", said)
    assert found, said
    assert not (tmp_path / "run").exists()  # the same command with another budget works
    assert cli.main([*words, "--memory.budget", f"{found[1]}{found[2]}"]) == 0
    assert (
        json.loads((tmp_path / "run/summary.json").read_text())["memory"][0]["budget"] == float(found[1]) * {"KB": 1e3, "MB": 1e6}[found[2]]
    )


@pytest.mark.parametrize("engine", ["auto", pytest.param("own", marks=pytest.mark.full)])
def test_workers_within_a_budget_have_the_bits_of_the_plain_run(config, plain, tmp_path, engine):
    words = (*FOUR, "--model.context", "64", "--train.batch", "16", "--train.steps", "2")
    usual = plain(*words)
    tight = train(config, tmp_path / "tight", *words, "--pipeline.mode", "workers", "--memory.budget", "5MB", "--pipeline.engine", engine)
    assert tight["weights_sha256"] == usual["weights_sha256"]
    depths = [stage["in_flight"] for stage in tight["memory"]]
    assert depths == sorted(depths, reverse=True)
    assert all(stage["peak"] <= stage["budget"] == 5_000_000 for stage in tight["memory"])


PLANS = {"keep": "k", "offload": "o", "recompute": "r", "mixed": "ork", "mixed again": "rok"}
DROPOUT = {"without dropout": (), "dropout": ("--model.dropout", "0.2"), "drift": ("--codec.drift_every", "2", "--model.dropout", "0.1")}
MATRIX = [
    pytest.param(plan, noise, marks=[] if (plan, noise) == ("mixed", "dropout") else pytest.mark.full)
    for plan in PLANS
    for noise in DROPOUT
]


@pytest.mark.parametrize(("plan", "noise"), MATRIX)
def test_four_workers_follow_any_plan(config, plain, tmp_path, plan, noise):
    usual = plain(*FOUR, *DROPOUT[noise])
    forced = train_forced(config, tmp_path / "forced", PLANS[plan], *FOUR, *DROPOUT[noise])
    assert forced["weights_sha256"] == usual["weights_sha256"]
    for stage in forced["memory"]:
        assert stage["peak"] <= stage["budget"]
        assert {choice[0] for choice in stage["choices"]} <= set(PLANS[plan])


@pytest.mark.parametrize("engine", ["auto", "own"])
@pytest.mark.full
def test_a_lost_stage_is_replaced_within_its_budget(config, plain, tmp_path, engine):
    """Survivors give a step up with saved tensors on their way; the replaced one measures and plans anew."""
    words = (*FOUR, "--train.steps", "6", "--model.dropout", "0.1")
    usual = plain(*words)
    faults = (Fault(1, "backward", 11), Fault(2, "forward", 20))
    forced = train_forced(config, tmp_path / "run", "or", *words, "--pipeline.engine", engine, faults=faults)
    assert len(os.listdir(tmp_path / "run-struck")) == 2
    assert forced["weights_sha256"] == usual["weights_sha256"]
    assert all(stage["peak"] <= stage["budget"] for stage in forced["memory"])


def newest_step(run: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.full
def test_a_disk_that_fills_up_ends_the_run_with_its_last_checkpoint(config, plain, tmp_path, capsys):
    """Two of four workers meet it, in the third step; the run goes on from the second once there is room."""
    usual = plain(*FOUR)
    with pytest.raises(ValueError, match=r"cannot write .*No space left on device; make room there.*--memory.folder") as caught:
        train_forced(config, tmp_path / "run", "o", *FOUR, full_after=(None, 22, 20, None))
    assert "forward_one_chunk" not in str(caught.value) and len(str(caught.value)) < 600
    assert newest_step(tmp_path / "run") == 2
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith(".")]
    resumed = train(config, tmp_path / "run", *FOUR, "--resume", "--pipeline.mode", "workers")
    assert resumed["weights_sha256"] == usual["weights_sha256"]


def test_a_disk_that_fills_up_in_one_process(config, plain, tmp_path, monkeypatch, capsys):
    usual = plain(*FOUR)

    def everything_out(profile, config, depth):
        monkeypatch.setattr(os, "pwrite", full_disk(90))  # once each at the start, then 36 writes a step
        return Plan(("offload",) * len(profile.blocks), 1, 0, 1.0, 1.0)

    monkeypatch.setattr("thinwire.memory.attach.plan_for", everything_out)
    threads = threading.active_count()
    words = ["train", "--config", config, "--run", str(tmp_path / "run"), "--train.threads", "1", *FOUR, "--memory.budget", "1GB"]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said and "--memory.folder" in said and "Traceback" not in said
    assert threading.active_count() == threads, threading.enumerate()
    monkeypatch.undo()
    assert newest_step(tmp_path / "run") == 2
    resumed = train(config, tmp_path / "run", *FOUR, "--resume")
    assert resumed["weights_sha256"] == usual["weights_sha256"]


def test_a_folder_that_is_not_there_is_refused(config, tmp_path, capsys):
    words = ["train", "--config", config, "--run", str(tmp_path / "run"), *ONE, "--memory.budget", "1GB"]
    assert cli.main([*words, "--memory.folder", str(tmp_path / "nowhere")]) == 2
    assert "is no folder; make it" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_schedule_that_cannot_be_bounded_is_refused(config, tmp_path, capsys):
    words = ["train", "--config", config, "--run", str(tmp_path / "run"), "--pipeline.mode", "workers", "--memory.budget", "1GB"]
    assert cli.main([*words, "--pipeline.schedule", "gpipe"]) == 2
    assert "leave --pipeline.schedule at auto" in capsys.readouterr().err and not (tmp_path / "run").exists()
