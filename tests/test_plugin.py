"""docs/writing_a_codec.md: its codec is short, is found through its entry point by the installed command, and trains."""

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


def install(folder: Path) -> None:
    """Put the page's package into a folder, as an installer would."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 30, f"{len(lines)} lines"
    (folder / "grouped_codec.py").write_text(code)
    (entry,) = re.findall(r"^grouped = \"(.*)\"$", PAGE.read_text(), re.MULTILINE)
    facts = folder / "grouped_codec-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: grouped-codec\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[thinwire.codecs]\ngrouped = {entry}\n")


@pytest.mark.parametrize("mode, bits, both_ways", [("workers", (), 2 * 16 + 2.125), ("inprocess", ("--codec.bits", "4"), 2 * 6 + 2.125)])
def test_a_codec_from_elsewhere_trains(config, tmp_path, mode, bits, both_ways):
    install(tmp_path)
    words = ["--config", config, "--run", str(tmp_path / "run"), "--codec.name", "grouped", "--pipeline.mode", mode, *bits]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "thinwire", "train", *words], env=environment, check=True, timeout=HANG, capture_output=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["codec"] == "grouped" and summary["steps"] == 6
    assert summary["bytes_per_token_forward"] + summary["bytes_per_token_backward"] == pytest.approx(both_ways)


def test_it_obeys_the_laws(tmp_path):
    install(tmp_path)
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "grouped"]
    command += [str(tests / "codecs" / "test_laws.py"), str(tests / "pipeline" / "test_codecs.py")]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=HANG)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout


def test_the_help_lists_its_options(tmp_path):
    install(tmp_path)
    command = [sys.executable, "-m", "thinwire", "train", "--codec.name", "grouped", "--help"]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=HANG)
    assert "--codec.size" in result.stdout
