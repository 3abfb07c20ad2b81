"""What is freed leaves the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from patience import HANG

CODE = """
import torch
from thinwire.memory.measure import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

assert return_freed_memory()
torch.set_num_threads(1)
del (held := [torch.ones(2**22) for _ in range(4)])[:]  # 16 MB each: from now on a heap would take what is smaller
before = resident()
held = [torch.ones(2**18) for _ in range(200)]
full = resident()
del held[::2]
print(full - before, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; the setting is glibc's")
def test_half_of_many_tensors_are_given_back():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=HANG)
    if "AssertionError" in done.stderr:
        pytest.skip("another C library")
    full, half = map(int, done.stdout.split())
    assert full > 190e6 and half < 0.6 * full
