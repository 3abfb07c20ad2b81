"""`thinwire train` and `thinwire eval` as a user types them, on a tiny model and text."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from patience import HANG, wait_until
from runs import VARIETY, train
from thinwire import checkpoint
from thinwire.cli import main as cli

SUMMARY = """steps tokens seconds tokens_per_second final_loss val_loss trainable_parameters codec stages model_sha256
bytes_per_token_forward bytes_per_token_backward framed_bytes socket_bytes compression link peak_rss_bytes weights_sha256"""


def test_summary_and_run_folder(config, tmp_path):
    summary = train(config, tmp_path / "run")
    assert summary.keys() >= set(SUMMARY.split())
    assert summary["steps"] == 6 and summary["tokens"] == 6 * 4 * 16
    assert summary["bytes_per_token_forward"] == 12 + 2 * 17 / 16 and summary["bytes_per_token_backward"] == 12
    assert summary["compression"] == pytest.approx(2 * 32 * 4 / (24 + 2 * 17 / 16))
    assert len(summary["weights_sha256"]) == summary["stages"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run/metrics/stage-all.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and "val_loss" in lines[3]
    assert all(set(line) >= {"loss", "compute_seconds", "encode_seconds", "wait_seconds", "decode_seconds"} for line in lines)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.toml",
        "tokenizer.json",
        "metrics",
        "checkpoints",
        "summary.json",
    }


CASES = VARIETY | {"muon": ("--train.optimizer", "muon")}


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_same_command_same_bits_and_resume_too(config, tmp_path, words):
    whole = train(config, tmp_path / "whole", *words)
    again = train(config, tmp_path / "again", *words)
    assert again["model_sha256"] == whole["model_sha256"]
    shutil.rmtree(tmp_path / "again/checkpoints/step-000006")
    resumed = train(config, tmp_path / "again", "--resume", *words)
    assert resumed["steps"] == 6 and (tmp_path / "again/checkpoints/step-000006").exists()
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    lines = (tmp_path / "again/metrics/stage-all.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_what_a_codec_measures_is_logged(config, tmp_path):
    train(config, tmp_path / "run", "--codec.name", "threshold", "--codec.density", "0.2", "--pipeline.stages", "4")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics/stage-all.jsonl").read_text().splitlines()]
    for line in lines:
        assert all(0.2 / 3 < line[f"density_{layer}"] < 0.2 * 3 for layer in (1, 2, 3))


def test_seed_changes_the_run(config, tmp_path):
    assert train(config, tmp_path / "a")["model_sha256"] != train(config, tmp_path / "b", "--seed", "1")["model_sha256"]


def test_time_limit_ends_the_run_with_a_checkpoint(config, tmp_path):
    summary = train(config, tmp_path / "run", "--train.seconds", "0.0001")
    assert summary["steps"] == 1
    assert (tmp_path / "run/checkpoints/step-000001/stage-1.json").exists()


def test_eval_agrees_with_the_summary(config, tmp_path, capsys):
    summary = train(config, tmp_path / "run")
    capsys.readouterr()
    assert cli.main(["eval", str(tmp_path / "run"), "--sequences", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(summary["val_loss"], rel=1e-6) and found["step"] == 6
    assert found["bits_per_byte"] > 0


def test_eval_on_another_source(config, tmp_path, capsys):
    train(config, tmp_path / "run")
    other = tmp_path / "other.txt"
    other.write_text("something else entirely, with other words and figures 42\n" * 300)
    capsys.readouterr()
    assert cli.main(["eval", str(tmp_path / "run"), "--data.source", str(other), "--sequences", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] > 0


def test_eval_keeps_to_the_tokenizer_of_the_run(config, tmp_path, capsys):
    """Text that has changed since must not retrain the tokenizer under a trained model."""
    train(config, tmp_path / "run")
    text = tmp_path / "text.txt"
    text.write_text("zzz qqq xxx\n" * 50 + text.read_text())
    outcomes = []
    for words in ([], ["--data.source", str(text)]):
        capsys.readouterr()
        assert cli.main(["eval", str(tmp_path / "run"), "--sequences", "8", *words]) == 0
        outcomes.append(json.loads(capsys.readouterr().out)["loss"])
    assert outcomes[0] == outcomes[1]


def test_a_finished_run_is_not_resumed(config, tmp_path, capsys):
    before = train(config, tmp_path / "run")
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--resume"]) == 2
    assert "is finished at step 6; to go on give a larger --train.steps" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/summary.json").read_text()) == before


def test_eval_of_a_folder_that_is_no_run(tmp_path, capsys):
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_divergence_is_an_error_and_keeps_the_last_checkpoint(config, tmp_path, capsys):
    words = [
        "train",
        "--config",
        config,
        "--run",
        str(tmp_path / "run"),
        "--train.rate",
        "1e30",
        "--train.steps",
        "40",
        "--train.clip",
        "0",
    ]
    assert cli.main(words) == 2
    assert "training has diverged" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_sigterm_writes_a_checkpoint_and_says_how_to_go_on(config, tmp_path):
    run = tmp_path / "run"
    words = ["train", "--config", config, "--run", str(run), "--train.threads", "1", "--train.steps", "100000"]
    process = subprocess.Popen([sys.executable, "-m", "thinwire", *words], stdout=subprocess.PIPE, text=True)
    try:
        metrics = run / "metrics/stage-all.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size, alive=lambda: process.poll() is None)
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == 0
    assert f"go on with: thinwire train --run {run} --resume" in output
    steps = int(re.search(r"stopped at step (\d+)", output)[1])
    assert steps >= 1 and checkpoint.newest(run, 2).name == f"step-{steps:06d}"
