"""Write files so that a reader sees the old one or the whole new one, never a part; read small ones that end.

Knows nothing of what is written; two writers of one path cannot disturb each other, the last to finish wins.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a uniquely named temporary file that becomes `path` when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Put a whole file in place, or nothing."""
    with atomic_file(path) as file:
        file.write(data)


def read_regular(path: Path, most: int) -> bytes:
    """Read a file, up to one byte more than `most`; refuse a pipe or a device, which might never end."""
    # Without O_NONBLOCK a pipe that nobody writes to holds the opening itself.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is not a regular file")
        return file.read(most + 1)
