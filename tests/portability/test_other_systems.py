"""What runs where a system lacks what Linux has: shims of Windows and macOS, and the same bits as here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portability.everything import RUNS
from runs import train, write_config

HERE = Path(__file__).parent
PROGRAMS = {
    "whoami": """#!/bin/sh\nprintf '"desktop\\\\ada","S-1-5-21-7"\\n'\n""",
    "icacls": """#!/bin/sh\ntest -s "$1" && exit 1  # too late: the key is in it\necho "$@" >> "$ICACLS_LOG"\n""",
}
"""What make_private calls on Windows."""


@pytest.fixture(scope="module")
def usual(tmp_path_factory, token_cache):
    """Return a config, and the weights of its runs on this system, in one process."""
    folder = tmp_path_factory.mktemp("usual")
    config, one = write_config(folder, token_cache), RUNS["budget"][:2]
    summaries = {"in process": train(config, folder / "run"), "budget": train(config, folder / "one", *one)}
    summaries["resumed"] = train(config, folder / "run", "--resume", "--train.steps", "8")
    return config, {name: summary["weights_sha256"] for name, summary in summaries.items()}


@pytest.fixture
def programs(tmp_path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="the shims look into /proc")
@pytest.mark.parametrize("system", ["windows", pytest.param("macos", marks=pytest.mark.full)])
def test_everything_runs_with_the_same_bits(usual, programs, tmp_path, system):
    """Imports, a training in one process and its resume, one within a budget that offloads all, workers; a console of few characters."""
    config, expected = usual
    log = tmp_path / "icacls.log"
    paths = [HERE / system, HERE.parent, Path(sys.modules["thinwire"].__file__).parents[1]]
    given = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONIOENCODING": "cp1252",
        "ICACLS_LOG": str(log),
    }
    words = [sys.executable, str(HERE / "everything.py"), config, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | given, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["modules"] > 200
    weights = {name: run["weights_sha256"] for name, run in found["runs"].items()}
    assert weights == expected | {"workers": expected["in process"]}
    assert set(found["runs"]["budget"]["memory"][0]["choices"]) == {"offload"}
    assert all((peak is None) == (system == "windows") for peak in found["runs"]["workers"]["peak_rss_bytes"])
    keys = log.read_text().splitlines() if log.exists() else []
    assert len(keys) == (2 if system == "windows" else 0) and all(line.endswith("/inheritance:r /grant:r *S-1-5-21-7:F") for line in keys)
    assert not list(tmp_path.rglob(".*"))
