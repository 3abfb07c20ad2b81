"""What another package adds by one file and one entry point: a codec, an exchange, a tracker. Found, listed, used, and obeying the laws.

An architecture from elsewhere is in tests/model/test_outside.py, a transport in tests/link/test_outside.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

PAGE = Path(__file__).parents[1] / "docs" / "writing_a_codec.md"


MAJORITY = '''
from dataclasses import dataclass

import numpy as np
import torch

from thinwire.replicas.exchange import Exchange, ExchangeOptions


@dataclass(frozen=True, kw_only=True)
class MajorityOptions(ExchangeOptions):
    """How far a vote goes."""

    size: float = 0.01
    """What the sign of a gradient counts."""

    def check(self, config):
        if self.size <= 0:
            raise ValueError(f"exchange.size is {self.size}; choose one above 0, such as 0.01")


class Majority(Exchange):
    """Go where most replicas want to: one bit per value (signSGD with majority vote, arXiv 1810.05291)."""

    Options = MajorityOptions

    def talks_before(self, step):
        return True

    @torch.no_grad()
    def gradients(self, named, step):
        wanted = torch.cat([gradient.flatten() for gradient in named.values()]) > 0
        votes = self.peers.gather(np.packbits(wanted.numpy()).tobytes())
        ayes = sum(np.unpackbits(np.frombuffer(vote, np.uint8), count=len(wanted)).astype(np.int64) for vote in votes)
        signs = torch.from_numpy(np.sign(2 * ayes - self.peers.count)) * self.options.size
        for gradient, part in zip(named.values(), signs.split([tensor.numel() for tensor in named.values()])):
            gradient.copy_(part.view(gradient.shape))
'''

TABLE = '''
from thinwire.metrics.track import Tracker


class Table(Tracker):
    """Write the loss of each step as a line of a table."""

    def __init__(self, run, config, *, resume):
        self.file = (run / "losses.csv").open("a" if resume else "w")

    def log(self, step, values):
        if "loss" in values:
            self.file.write(f"{step},{values['loss']:.6f}\\n")

    def close(self):
        self.file.close()
'''


def put(folder: Path, module: str, code: str, group: str, entry: str) -> None:
    """Put a package of one file into a folder, as an installer would."""
    (folder / f"{module}.py").write_text(code)
    facts = folder / f"{module}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")


def install(folder: Path) -> None:
    """Install the page's codec."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 30, f"{len(lines)} lines"
    (entry,) = re.findall(r"^grouped = \"(.*)\"$", PAGE.read_text(), re.MULTILINE)
    put(folder, "grouped_codec", code, "thinwire.codecs", f"grouped = {entry}")


def install_exchange(folder: Path) -> None:
    """Install an exchange."""
    put(folder, "majority_exchange", MAJORITY, "thinwire.exchanges", "majority = majority_exchange:Majority")


def install_tracker(folder: Path) -> None:
    """Install a tracker."""
    put(folder, "table_tracker", TABLE, "thinwire.trackers", "table = table_tracker:Table")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python that finds what is in the folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
    return subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True, timeout=HANG)


@pytest.mark.parametrize("mode, bits, both_ways", [("workers", (), 2 * 16 + 2.125), ("inprocess", ("--codec.bits", "4"), 2 * 6 + 2.125)])
def test_a_codec_from_elsewhere_trains(config, tmp_path, mode, bits, both_ways):
    install(tmp_path)
    words = ["--config", config, "--run", str(tmp_path / "run"), "--codec.name", "grouped", "--pipeline.mode", mode, *bits]
    result = run(tmp_path, "thinwire", "train", *words)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["codec"] == "grouped" and summary["steps"] == 6
    assert summary["bytes_per_token_forward"] + summary["bytes_per_token_backward"] == pytest.approx(both_ways)


def test_an_exchange_from_elsewhere_trains_in_workers_and_resumes(config, tmp_path):
    install_exchange(tmp_path)
    grid = ["--pipeline.mode", "workers", "--replicas.count", "2", "--train.batch", "8"]
    words = ["--config", config, "--run", str(tmp_path / "run"), *grid, "--exchange.name", "majority", "--exchange.size", "0.02"]
    for more in ([], ["--resume", "--train.steps", "8"]):
        result = run(tmp_path, "thinwire", "train", *words, *more)
        assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exchange"] == "majority:size=0.02" and summary["steps"] == 8
    stages = len(summary["weights_sha256"]) // 2
    assert summary["weights_sha256"][:stages] == summary["weights_sha256"][stages:]
    assert 0 < summary["bytes_per_step"]["exchange"] < 2 * summary["trainable_parameters"] / 8 + 2 * stages


@pytest.mark.parametrize("mode", ["workers", "inprocess"])
def test_a_tracker_from_elsewhere_sees_every_step(config, tmp_path, mode):
    install_tracker(tmp_path)
    words = ["--config", config, "--run", str(tmp_path / "run"), "--pipeline.mode", mode, "--track", "table"]
    for more in ([], ["--resume", "--train.steps", "8"]):
        result = run(tmp_path, "thinwire", "train", *words, *more)
        assert result.returncode == 0, result.stderr
    lines = [line.split(",") for line in (tmp_path / "run" / "losses.csv").read_text().splitlines()]
    metrics = [json.loads(line) for line in min((tmp_path / "run" / "metrics").iterdir()).read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in lines] == [(row["step"], round(row["loss"], 6)) for row in metrics]
    assert len(lines) == 8
    refused = run(tmp_path, "thinwire", "train", *words, "--track", "tabel")
    assert refused.returncode == 2 and "choose from table, tensorboard, trackio" in refused.stderr


@pytest.mark.parametrize(
    "made, name, files",
    [
        (install, "grouped", ("codecs/test_laws.py", "pipeline/test_codecs.py")),
        (install_exchange, "majority", ("replicas/test_laws.py",)),
    ],
)
def test_it_obeys_the_laws(tmp_path, made, name, files):
    made(tmp_path)
    tests = [str(Path(__file__).parent / file) for file in files]
    result = run(tmp_path, "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", name, *tests)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout


@pytest.mark.parametrize(
    "made, name, option", [(install, "codec.name", "codec.size"), (install_exchange, "exchange.name", "exchange.size")]
)
def test_the_help_lists_its_options(tmp_path, made, name, option):
    made(tmp_path)
    chosen = "grouped" if made is install else "majority"
    assert f"--{option}" in run(tmp_path, "thinwire", "train", f"--{name}", chosen, "--help").stdout
    assert chosen in run(tmp_path, "thinwire", "--help").stdout
