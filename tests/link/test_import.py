"""The link needs no torch and starts nothing when imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import thinwire.link
from patience import HANG


def test_no_module_of_the_link_loads_torch_or_starts_a_thread():
    folder = Path(thinwire.link.__file__).parent
    names = [f"thinwire.link.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"]
    assert "thinwire.link.loop" in names
    code = f"import sys, threading, {', '.join(names)}; print('torch' in sys.modules, 'numpy' in sys.modules, threading.active_count())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG)
    assert result.stdout.split() == ["False", "False", "1"]
