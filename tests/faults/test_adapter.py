"""An adapter run through faults: recovery reads the frozen weights again, and changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.inject import Fault, train_with
from faults.support import WORDS, assert_struck, restored
from runs import train
from thinwire.cli import main as cli

pytest.importorskip("transformers")


def adapter_run(settings: str, folder: Path, run: Path) -> Path:
    """Import a folder as an adapter run of four workers."""
    words = ("--adapter.rank", "2", "--adapter.base_format", "bf16", "--adapter.dropout", "0.1", "--codec.name", "quantize")
    assert cli.main(["import", str(folder), "--run", str(run), "--config", settings, *WORDS, "--pipeline.mode", "workers", *words]) == 0
    return run


def test_a_killed_stage_of_an_adapter_run_changes_no_bit(settings, tmp_path):
    train(settings, tmp_path / "first", "--train.steps", "2", "--codec.name", "dense", "--pipeline.mode", "inprocess")
    assert cli.main(["export", str(tmp_path / "first"), str(tmp_path / "folder"), "--sequences", "0"]) == 0
    quiet = adapter_run(settings, tmp_path / "folder", tmp_path / "quiet")
    expected = train_with(["--run", str(quiet), "--resume", "--pipeline.mode", "inprocess"], [], tmp_path / "none", [])
    run, faults = adapter_run(settings, tmp_path / "folder", tmp_path / "run"), [Fault(2, "forward", 9), Fault(0, "optimizer", 7)]
    heard: list[tuple[int, dict]] = []
    summary = train_with(["--run", str(run), "--resume"], faults, tmp_path / "struck", heard)
    assert_struck(tmp_path, faults)
    assert summary["model_sha256"] == expected["model_sha256"] and restored(heard)
    stages = [int(path.stem[6:]) for path in (run / "checkpoints/base").glob("stage-*.json")]
    assert sorted(stages) == [0, 1, 2, 3]
