"""Write files so that a reader sees the old one or the whole new one, never a part.

Knows nothing of what is written; two writers of one path cannot disturb each other, the last to finish wins.
"""

from __future__ import annotations

import os
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
