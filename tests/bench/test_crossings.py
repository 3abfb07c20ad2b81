"""How often a warm step and a recovery cross from one folder of the package to another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

SCRIPT = Path(__file__).parents[2] / "bench" / "crossings.py"
MOST = {"step": 60, "recovery": 100}


@pytest.mark.full
def test_calls_between_folders_are_few():
    printed = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=HANG).stdout
    found = {name: int(count) for name, count in re.findall(r"^(\w+): (\d+) folder changes", printed, re.MULTILINE)}
    assert found.keys() == MOST.keys()
    assert all(found[name] <= most for name, most in MOST.items()), printed
