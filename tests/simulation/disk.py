"""The disks of the simulation: real files, some of which cannot be written for a while."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest import mock

from thinwire.cluster.backups import Copies

SAVER = "thinwire.checkpoint.saver.write_parts"
WRITERS = (
    "thinwire.cluster.places.write_atomic",
    "thinwire.run.folder.write_atomic",
    "thinwire.run.last.write_atomic",
)
"""What writes a file whose path is its first argument."""


class Disks:
    """Which folders take no more bytes, and how long a checkpoint takes."""

    def __init__(self) -> None:
        self.full: set[Path] = set()
        self.wait: Callable[[], None] = lambda: None
        """Called before a checkpoint is written."""

    def check(self, path: Path) -> None:
        if any(folder in self.full for folder in (path, *path.parents)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the product write to these disks; nothing is forced to a real one."""
        with ExitStack() as stack:
            for name in WRITERS:
                stack.enter_context(mock.patch(name, self._checked(resolve_name(name))))
            save = resolve_name(SAVER)

            def saved(folder: Path, parts: Any) -> None:
                self.wait()
                self.check(folder)
                save(folder, parts)

            stack.enter_context(mock.patch(SAVER, saved))
            write = Copies._write

            def checked(copies: Any, neighbour: int, piece: bytes) -> None:
                self.check(copies.folder)
                write(copies, neighbour, piece)

            stack.enter_context(mock.patch.object(Copies, "_write", checked))
            stack.enter_context(mock.patch("os.fsync", leave))
            stack.enter_context(mock.patch("shutil.disk_usage", look))
            yield

    def _checked(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Path, *arguments: Any) -> Any:
            self.check(path)
            return write(path, *arguments)

        return checked


def leave(number: int) -> None:
    """Leave a file in the memory of this machine; a mock would remember every call."""


def look(folder: Path) -> SimpleNamespace:
    """Find always the same room: it is part of what workers tell each other."""
    return SimpleNamespace(free=0)
