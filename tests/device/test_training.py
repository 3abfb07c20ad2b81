"""Train, resume, evaluate and write on the strict device: the bits of the CPU, whose kernels it uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runs import train
from thinwire import api
from thinwire.config.registry import CODECS

SHORT = ("--train.steps", "3", "--train.checkpoint_every", "0", "--train.validation_sequences", "2")


def outcome(config: str, run: Path, device: str, *words: str) -> tuple[list[float], list[str]]:
    """Train; return all losses and the hashes of the weights."""
    summary = train(config, run, "--device", device, *words)
    rows = [json.loads(line) for line in min((run / "metrics").iterdir()).read_text().splitlines()]
    return [*(row["loss"] for row in rows), summary["val_loss"]], summary["weights_sha256"]


def check_equal(config: str, folder: Path, *words: str) -> None:
    """Train on the CPU and on the strict device; losses must be equal, and so must the weights."""
    (losses, weights), (there, weights_there) = (outcome(config, folder / name, name, *words) for name in ("cpu", "strict"))
    assert there == pytest.approx(losses, abs=1e-6)
    assert weights_there == weights


CODEC_CASES = {name: ("--codec.name", name) for name in CODECS.names()} | {
    "few bits": ("--codec.bits", "3", "--codec.backward_bits", "4", "--codec.rounding", "stochastic"),
    "entropy": ("--codec.entropy", "true", "--codec.rate", "1.5"),
    "drift and dropout": ("--codec.drift_every", "2", "--codec.drift_rate", "0.5", "--model.dropout", "0.1"),
    "no table of features": ("--codec.fixed_cache_mb", "0"),
    "warm-up": ("--codec.name", "topk", "--codec.warmup", "2"),
    "learned projector, n-grams": (
        *("--codec.name", "anchored", "--codec.projector", "learned", "--codec.projector_every", "2"),
        *("--codec.ngrams", "3", "--codec.anchors", "factorised"),
    ),
}
CHEAP = ("entropy", "drift and dropout", "topk", "few bits")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.full) for name in CODEC_CASES])
def test_codecs(strict, config, tmp_path, name):
    check_equal(config, tmp_path, *SHORT, *CODEC_CASES[name])


@pytest.mark.parametrize("optimizer", ["shared", "adamw", "muon"])
def test_optimizers_go_on_from_a_checkpoint(strict, config, tmp_path, optimizer):
    words = ("--train.optimizer", optimizer, "--train.validation_sequences", "2", "--train.decay", "0")
    whole = train(config, tmp_path / "cpu", *words, "--train.steps", "4")
    train(config, tmp_path / "there", *words, "--train.steps", "2", "--device", "strict")
    resumed = train(config, tmp_path / "there", *words, "--train.steps", "4", "--device", "strict", "--resume")
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16"])
def test_autocast(strict, config, tmp_path, dtype):
    check_equal(config, tmp_path, *SHORT, "--train.dtype", dtype)


def test_evaluate_and_write(strict, config, tmp_path):
    words = ("--codec.name", "anchored", "--codec.ngrams", "3", *SHORT)
    train(config, tmp_path / "run", *words)
    found = [api.evaluate(tmp_path / "run", device=device, sequences=2)["loss"] for device in ("cpu", "strict")]
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    texts = [api.generate(tmp_path / "run", "3 plus", max_new_tokens=8, device=device) for device in ("cpu", "strict")]
    assert texts[0] == texts[1]
