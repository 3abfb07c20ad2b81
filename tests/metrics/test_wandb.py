"""Curves for Weights & Biases, against a stub of its package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from thinwire.codecs.build import codec_defaults
from thinwire.config.sections import DataConfig, RunConfig
from thinwire.metrics.trackers.open import open_trackers


class Server:
    """Stand in for the package: note what a run was begun with and what it logs."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **words: Any) -> Server:
        self.begun.append(words)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def server(monkeypatch) -> Server:
    stub, made = ModuleType("wandb"), Server()
    stub.init = made.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.delitem(sys.modules, "thinwire.metrics.trackers.wandb", raising=False)
    return made


def logged(run: Path, config: RunConfig, steps: range, *, resume: bool) -> None:
    with open_trackers(["wandb"], run, config, resume=resume) as (tracker,):
        for step in steps:
            tracker.log(step, {"loss": 2.0 / step, "name": "text"})


def test_numbers_go_out_and_a_resume_goes_on_with_the_same_run(server, tmp_path):
    run, config = tmp_path / "project/first", RunConfig(codec=codec_defaults("dense"), data=DataConfig(source="/home/me/secret.txt"))
    logged(run, config, range(1, 3), resume=False)
    logged(run, config, range(3, 4), resume=True)
    logged(tmp_path / "project/second", config, range(1, 2), resume=False)
    first, again, other = server.begun
    assert server.rows == [(1, {"loss": 2.0}), (2, {"loss": 1.0}), (3, {"loss": 2.0 / 3}), (1, {"loss": 2.0})] and server.finished == 3
    assert first["id"] == again["id"] != other["id"] and (first["project"], first["name"]) == ("project", "first")
    assert first["config"]["train.steps"] == config.train.steps and "secret" not in str(first["config"])


def test_without_a_step_nothing_is_begun(server, tmp_path):
    with open_trackers(["wandb"], tmp_path / "run", RunConfig(codec=codec_defaults("dense")), resume=False):
        pass
    assert not server.begun and not (tmp_path / "run").exists()
