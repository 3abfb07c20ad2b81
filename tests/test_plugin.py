"""What another package adds by one file and one entry point: a codec, an exchange, a tracker. Found, listed, used, and obeying the laws.

The code is that of docs/writing_a_codec.md and docs/extending.md.
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

DOCS = Path(__file__).parents[1] / "docs"


def put(folder: Path, module: str, code: str, group: str, entry: str) -> None:
    """Put a package of one file into a folder, as an installer would."""
    (folder / f"{module}.py").write_text(code)
    facts = folder / f"{module}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")


def code_of(page: str, module: str) -> str:
    """Return the block of a page that says that it is this module."""
    (code,) = re.findall(rf"```python\n(# {module}\.py\n.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return code


def install(folder: Path) -> None:
    """Install the codec of writing_a_codec.md."""
    code = code_of("writing_a_codec.md", "grouped_codec")
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 30, f"{len(lines)} lines"
    put(folder, "grouped_codec", code, "thinwire.codecs", entry_of("writing_a_codec.md", "grouped"))


def entry_of(page: str, name: str) -> str:
    """Return the entry point of a page's example, as an installer writes it."""
    (place,) = re.findall(rf"^{name} = \"(.*)\"$", (DOCS / page).read_text(), re.MULTILINE)
    return f"{name} = {place}"


def install_exchange(folder: Path) -> None:
    """Install the exchange of extending.md."""
    code = code_of("extending.md", "majority_exchange")
    put(folder, "majority_exchange", code, "thinwire.exchanges", entry_of("extending.md", "majority"))


def install_tracker(folder: Path) -> None:
    """Install the tracker of extending.md."""
    put(folder, "table_tracker", code_of("extending.md", "table_tracker"), "thinwire.trackers", "table = table_tracker:Table")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python that finds what is in the folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
    return subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True, timeout=HANG)


@pytest.mark.parametrize(
    "mode, bits, both_ways",
    [("workers", (), 2 * 16 + 2.125), pytest.param("inprocess", ("--codec.bits", "4"), 2 * 6 + 2.125, marks=pytest.mark.full)],
)
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


@pytest.mark.parametrize("mode", ["inprocess", pytest.param("workers", marks=pytest.mark.full)])
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
        pytest.param(install_exchange, "majority", ("replicas/test_laws.py",), marks=pytest.mark.full),
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
