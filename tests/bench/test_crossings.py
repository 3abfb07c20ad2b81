"""The data's way passes each layer once: how often a warm step goes from one folder to another is bounded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
MOST = 60
"""Folder changes of a warm step of stage 0 of two, with two microbatches."""


def test_a_warm_step_changes_folders_rarely():
    done = subprocess.run([sys.executable, str(BENCH / "crossings.py")], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^step: (\d+) folder changes", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert 0 < int(found[1]) <= MOST, done.stdout
