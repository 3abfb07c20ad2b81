"""Learning from answers: the same bits in one process, in workers and after a resume; replicas do not change what a token weighs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.conversations import sums, write_rows
from runs import train, write_config

WORDS = ("--data.loss", "completions", "--model.context", "40", "--train.validate_every", "0", "--train.decay", "0")


@pytest.fixture
def config(tmp_path, token_cache) -> str:
    path = write_config(tmp_path, token_cache)
    text = (
        Path(path).read_text().replace(json.dumps(str(tmp_path / "text.txt")), json.dumps(str(write_rows(tmp_path / "a.jsonl", sums(90)))))
    )
    Path(path).write_text(text)
    return path


def losses(run: Path) -> list[float]:
    """Return the losses of the steps, from the last of the metrics files."""
    return [json.loads(line)["loss"] for line in max(run.rglob("*.jsonl")).read_text().splitlines()]


CASES = {
    "several in a window": ("--model.separator", "0"),
    "one each": (),
    "entropy": ("--model.separator", "0", "--codec.entropy", "true", "--codec.rate", "1.5"),
}


@pytest.mark.parametrize("name", [name if name == "entropy" else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_workers_and_a_resume_give_the_bits_of_one_process(config, tmp_path, name):
    words = CASES[name]
    whole = train(config, tmp_path / "whole", *WORDS, *words)
    workers = train(config, tmp_path / "workers", *WORDS, *words, "--pipeline.mode", "workers")
    assert workers["weights_sha256"] == whole["weights_sha256"] and workers["val_loss"] == whole["val_loss"]
    train(config, tmp_path / "part", *WORDS, *words, "--train.steps", "3")
    resumed = train(config, tmp_path / "part", *WORDS, *words, "--resume")
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["steps"] == 6


def test_replicas_and_microbatches_do_not_change_the_loss(config, tmp_path):
    words = ("--codec.name", "dense", "--codec.dtype", "fp32", *WORDS)
    train(config, tmp_path / "one", *words, "--pipeline.microbatches", "4")
    more = ("--pipeline.mode", "workers", "--replicas.count", "2", "--pipeline.microbatches", "1", "--data.everywhere")
    summary = train(config, tmp_path / "two", *words, *more)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert summary["bytes_per_token_ids"] == 0
