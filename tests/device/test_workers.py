"""Workers on the strict device, a card each: a budget that offloads and recomputes, a worker that is lost, evaluation and text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import HANG
from runs import train

TESTS = Path(__file__).parents[1]
LOST = """
import json, sys
import torch
from faults.inject import Fault
from memory.forced import train_forced
from pathlib import Path

if __name__ == "__main__":
    config, run, *words = sys.argv[1:]
    summary = train_forced(config, Path(run), "rok", *words, faults=(Fault(1, "backward", 3),))
    print(json.dumps(summary))
"""


@pytest.fixture
def run_python(strict_package, tmp_path):
    """Return a function that runs Python where the device is found, and returns the last line that it prints."""
    paths = [str(strict_package), str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def run(*words: str) -> Any:
        done = subprocess.run([sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.splitlines()

    return run


@pytest.mark.full
def test_a_budget_and_a_lost_worker_change_no_bit(run_python, config, tmp_path):
    words = ("--train.steps", "4", "--train.optimizer", "adamw", "--train.validation_sequences", "2")
    plain = train(config, tmp_path / "plain", *words)
    (tmp_path / "lost.py").write_text(LOST)
    summary = json.loads(run_python(str(tmp_path / "lost.py"), config, str(tmp_path / "run"), "--device", "strict", *words)[-1])
    assert summary["weights_sha256"] == plain["weights_sha256"]
    assert summary["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-6)
    kinds = {choice for stage in summary["memory"] for choice in stage["choices"]}
    assert kinds == {"keep", "recompute", "offload"}
    assert len(list((tmp_path / "run-struck").iterdir())) == 1, "no worker was lost"


@pytest.mark.full
@pytest.mark.parametrize("exchange", ["allreduce", "gravac", "powersgd", "ist"])
def test_replicas(run_python, config, tmp_path, exchange):
    words = ("--train.batch", "8", "--train.steps", "3", "--train.validation_sequences", "2", "--exchange.name", exchange)
    grid = ("--pipeline.mode", "workers", "--replicas.count", "2", "--train.threads", "1", "--config", config)
    for device in ("cpu", "strict"):
        run_python("-m", "thinwire", "train", "--run", str(tmp_path / device), "--device", device, *grid, *words)
    found = [json.loads((tmp_path / device / "summary.json").read_text()) for device in ("cpu", "strict")]
    assert found[1]["val_loss"] == pytest.approx(found[0]["val_loss"], abs=1e-6)


@pytest.mark.full
def test_evaluate_and_write_in_workers(run_python, config, tmp_path):
    train(config, tmp_path / "run", "--codec.name", "anchored", "--codec.ngrams", "3", "--train.steps", "3")
    program = f"""
import thinwire
if __name__ == "__main__":
    for device in ("cpu", "strict"):
        print(repr((
            thinwire.evaluate({str(tmp_path / "run")!r}, mode="workers", device=device, sequences=2)["loss"],
            thinwire.generate({str(tmp_path / "run")!r}, "3 plus", mode="workers", device=device, max_new_tokens=6),
        )))
"""
    (tmp_path / "both.py").write_text(program)
    first, second = run_python(str(tmp_path / "both.py"))[-2:]
    assert first == second
