"""What the demo says of two runs: all that it measured, and nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

import demo


def result(codec: str, steps: int, bytes_per_token: float, fall: float) -> demo.Result:
    lines = [
        {"step": step, "loss": 8.0 - fall * step, "seconds": 40.0 * step / steps, "tokens": 1000 * step, "right_mbps": 1.5}
        for step in range(1, steps + 1)
    ]
    summary = {"steps": steps, "tokens_per_second": 250.0, "val_loss": 7.0}
    return summary | {"bytes_per_token_forward": bytes_per_token + 2, "bytes_per_token_backward": bytes_per_token}, lines


@pytest.fixture
def arguments() -> argparse.Namespace:
    return argparse.Namespace(seconds=40.0, batch=8, profile="dsl_2mbps", out=Path())


RESULTS = {"dense": result("dense", 12, 512.0, 0.05), "subspace": result("subspace", 120, 16.0, 0.02)}


def test_the_table_has_the_setting_the_bytes_and_when_the_loss_was_reached(arguments):
    console = Console(width=200)
    with console.capture() as captured:
        console.print(demo.report(RESULTS, arguments))
    printed = captured.get()
    title = "4 workers on one machine, links of 2 Mbit/s and 20 ms each way (emulated), 8 sequences per step; 40 s of training each"
    assert title in " ".join(printed.split())
    dense, subspace = (line.split() for line in printed.splitlines() if line.strip().startswith(("dense", "subspace")))
    assert dense == ["dense", "12", "250", "7.475", "7.000", "514.0", "512.0", "75", "%", "40"]
    assert subspace == ["subspace", "120", "250", "5.630", "7.000", "18.0", "16.0", "75", "%", "9"]


def test_the_picture_has_the_bytes(arguments, tmp_path):
    pytest.importorskip("matplotlib")
    assert demo.label("dense", RESULTS["dense"][0]) == "dense: 12 steps, 514 + 512 bytes per token"
    assert demo.megabytes(*RESULTS["dense"])[-1] == pytest.approx(12_000 * 1026 / 1e6)
    demo.draw(RESULTS, tmp_path / "loss.png", arguments)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
