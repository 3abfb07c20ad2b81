"""Rubbish for everything that reads what others wrote: two hundred inputs each, always the same ones (bench/fuzz.py has more)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
NAMES = ("hello", "votes", "outcomes", "facts", "manifests", "rosters", "copies", "configs", "places", "questions", "frames", "payloads")


def test_rubbish_is_refused_by_name():
    """In a process of its own: it has limits of memory and time, and a fault may end it."""
    words = [sys.executable, str(BENCH / "fuzz.py"), "--inputs", "200", *NAMES]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [*NAMES]


def test_a_reader_that_fails_is_found(tmp_path):
    """The oracle: an error of another kind, and a text that cannot be shown."""
    code = "import collections, fuzz, fuzz_targets\n"
    code += "def run(data, folder): {body}\n"
    code += "fuzz.judge(fuzz_targets.Target(None, run, (ValueError,)), b'x', None, collections.Counter())\n"
    for body, found in (("return {}[1]", "KeyError"), ("raise ValueError('\\x1b')", "cannot be shown"), ("raise ValueError('no')", "")):
        done = subprocess.run([sys.executable, "-c", code.format(body=body)], cwd=BENCH, capture_output=True, text=True, timeout=500)
        assert (done.returncode == 0) == (not found) and found in done.stderr, done.stderr
