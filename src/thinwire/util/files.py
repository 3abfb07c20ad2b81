"""Write files so that a reader sees the old one or the whole new one, never a part; read small ones that others have made.

Knows nothing of what is written; two writers of one path cannot disturb each other, the last to finish wins.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from thinwire.util.system import has_owners, make_private, replace_file


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a uniquely named temporary file that becomes `path` when the block ends well; `mode` is its from the first moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if not mode & 0o077:
                make_private(temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        replace_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Put a whole file in place, or nothing."""
    with atomic_file(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, written to the disk."""
    if not has_owners() and path.is_dir():  # on Windows, where a folder cannot be opened, and a file only be synced by who may write to it
        return
    number = os.open(path, os.O_RDONLY if has_owners() else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def files_below(folder: Path, skipped: Collection[str] = ()) -> list[Path]:
    """List all files below a folder, sorted, but for folders of `skipped` names; links to folders are not followed."""
    found: list[Path] = []
    for inside, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        found += [path for name in names if (path := Path(inside, name)).is_file()]
    return sorted(found)


def read_small(path: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes; anything else is refused at once: a pipe would wait, a device has no end."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise ValueError(f"{path} is not a regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} has more than {most} bytes, the most that such a file may have")
    return data


def read_matching(folders: Iterable[Path], pattern: str, most: int) -> dict[Path, dict[Path, bytes | None]]:
    """Read the small files of some folders that have such names; by folder and path, None for one that cannot be read."""
    found: dict[Path, dict[Path, bytes | None]] = {}
    for folder in folders:
        files: dict[Path, bytes | None] = {}
        for path in matching(folder, pattern):
            try:
                files[path] = read_small(path, most)
            except (OSError, ValueError):
                files[path] = None
        found[folder] = files
    return found


def remove_matching(folder: Path, patterns: Iterable[str]) -> None:
    """Delete the files of a folder by patterns for names, in that order, and the folder with the last of its files."""
    for pattern in patterns:
        for path in matching(folder, pattern):
            path.unlink(missing_ok=True)
    with suppress(OSError):  # something else is still there
        folder.rmdir()


def matching(folder: Path, pattern: str) -> list[Path]:
    """List what is in a folder by a pattern for names; nothing if the folder is not there, or another process takes it away meanwhile."""
    try:
        return sorted(folder.glob(pattern))
    except FileNotFoundError:
        return []
