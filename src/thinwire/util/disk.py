"""What to say when a disk does not take what is written: where, how much room there is, what to do. Whoever calls decides to go on."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk without room."""


def shortage(path: Path, error: Exception, needed: int | None = None) -> str:
    """Say why something was not written, how much room there is and was needed, and what helps."""
    reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    folder = next((each for each in path.absolute().parents if each.is_dir()), Path("/"))
    try:
        free = f"{folder} has {size_text(shutil.disk_usage(folder).free)} free"
    except OSError:
        free = f"{folder} cannot be looked at"
    wanted = "" if needed is None else f", {size_text(needed)} are needed"
    is_full = isinstance(error, OSError) and error.errno in FULL
    return f"{reason}; {free}{wanted}; {'make room there' if is_full else 'see to it that this place can be written'}"


def size_text(count: float) -> str:
    """Write a number of bytes."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} KB"
