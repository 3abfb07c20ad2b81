"""A whole comparison of exchanges with a tiny model: rows, page, plots; what is there is not made again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from thinwire.board import comparison, measure
from thinwire.cli import main as cli

WORDS = ("--steps", "6", "--train.validate_every", "2", "--speed-steps", "4", "--replicas.count", "2", "--name", "pair")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "LOOK_SECONDS", 0.05)


def compare(config: str, *words: str, code: int = 0) -> None:
    assert cli.main(["compare", *words, "--config", config, *WORDS]) == code


def files(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.full
def test_a_whole_comparison_and_again(config, capsys, monkeypatch):
    words = ("--exchange", "allreduce", "local:steps=2,packing=fp32", "--links", "20mbps_5ms")
    compare(config, *words)
    printed = capsys.readouterr().out
    assert "[2/2] learn local-steps2-packingfp32 seed 0: validation loss" in printed
    assert max(map(len, printed.splitlines())) <= 120 and "all boards" not in printed
    rows = [json.loads(Path(f"out/exchanges/learn/{name}-2x2-6-0.json").read_text()) for name in ("allreduce", "local-steps2-packingfp32")]
    # Each of two replicas sends half of its gradients and half of the sums; local does so with changes, every other step.
    assert rows[0]["bytes_per_step_exchange"] == 2 * 4 * rows[0]["trainable_parameters"] == 2 * rows[1]["bytes_per_step_exchange"]
    assert rows[0]["bytes_per_step_boundary"] == rows[1]["bytes_per_step_boundary"] > 0 and rows[0]["bytes_per_step_control"] > 0
    assert list(rows[1]["curve"]) == ["2", "4", "6"] and rows[1]["curve"]["6"] == rows[1]["val_loss"] != rows[0]["val_loss"]
    assert [rows[1]["settings"][f"exchange.{option}"] for option in ("name", "steps", "packing")] == ["local", 2, "fp32"]
    timed = json.loads(Path("out/exchanges/speed/local-steps2-packingfp32-2x2-20mbps_5ms.json").read_text())
    assert timed["turns"][0]["steps"] == 4 and len(timed["peak_rss_bytes"]) == 4
    page = Path("out/exchanges/pair.md").read_text()
    assert page.startswith("# pair\n") and "2 replicas of 2 stages, codec `subspace`" in page and "allreduce's after 3 steps" in page
    assert "| local:steps=2,packing=fp32 |" in page and "| 2.00x |" in page and "fewer than allreduce" in page
    names = ("1-steps", "2-bytes", "3-20mbps_5ms")
    assert {path.name for path in Path("out/exchanges/plots/pair").iterdir()} == {
        f"{name}.{end}" for name in names for end in ("png", "svg")
    }
    assert all((Path("out/exchanges") / part.split(")")[0]).exists() for part in page.split("](")[1:]) and page.count("](plots/pair/") == 3
    assert not Path("out/board").exists() and not Path("out/exchanges.md").exists()
    before = files("out")
    monkeypatch.setattr(measure, "train_row", None)
    compare(config, *words, "--redraw")
    assert files("out") == before
    monkeypatch.setattr(comparison, "draw_plots", lambda *_: [])  # most of the time goes into plots
    compare(config, *words)
    assert files("out") == before


def test_an_interrupted_row_goes_on_where_all_replicas_were(config, monkeypatch):
    monkeypatch.setattr(comparison, "draw_plots", lambda *_: [])
    words = ("--exchange", "local:steps=2,warmup=3", "--links", "--target", "4")
    compare(config, *words)
    name = "local-steps2-warmup3-2x2-6-0"
    path, folder = Path(f"out/exchanges/learn/{name}.json"), Path(f"out/exchanges/runs/{name}")
    before = json.loads(path.read_text())
    path.unlink()
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "replica-1/checkpoints/step-000006")
    compare(config, *words)
    after = json.loads(path.read_text())
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["bytes_per_step"]["exchange"] < before["bytes_per_step_exchange"], "it was not resumed: it has sent all of it"
    assert after["curve"] == before["curve"] and after["bytes_per_step_exchange"] == before["bytes_per_step_exchange"]


def test_replicas_of_one_stage(config, monkeypatch):
    monkeypatch.setattr(comparison, "draw_plots", lambda *_: [])
    compare(config, "--exchange", "allreduce", "--links", "open", "--pipeline.stages", "1", "--train.threads", "1")
    row = json.loads(Path("out/exchanges/learn/allreduce-2x1-6-0.json").read_text())
    assert row["bytes_per_step_boundary"] == 0 and row["bytes_per_step_exchange"] == 8 * row["trainable_parameters"]
