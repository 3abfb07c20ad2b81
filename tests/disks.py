"""Small disks that are really full: file systems of a few megabytes, mounted for a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, megabytes: int = 3) -> Iterator[Path]:
    """Mount a small file system; skip the test where that is not allowed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounts a file system: needs root on Linux")
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a small disk: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room on a disk; return the file to delete."""
    path = folder / "filler"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (2**16, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return path
