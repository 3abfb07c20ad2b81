"""One process per run folder: a lock that the operating system lets go of when its process ends, however it ends."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.util.disk import FULL, shortage
from thinwire.util.notices import warn
from thinwire.util.system import seize

LOCK_FILE = "lock"
"""In the run folder while a process trains there: its number and its machine."""


@contextmanager
def locked(run: Path, option: str = "--run") -> Iterator[None]:
    """Keep other processes out of a run folder, which people choose with an `option` of the command line.

    A folder that this made, and in which nothing was written, goes again.
    """
    there = run.is_dir()
    handle = acquire(run, option)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):  # on Windows it is still open, and stays
                (run / LOCK_FILE).unlink()
            os.close(handle)
        if not there:
            with suppress(OSError):  # it holds a run now
                run.rmdir()


def acquire(run: Path, option: str) -> int | None:
    """Lock a run folder and return the open file; None if the disk has no room for one. Raise ValueError if another process has it."""
    path = run / LOCK_FILE
    while True:
        try:
            run.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            if error.errno in FULL:
                warn(f"{path} was not written: {shortage(path, error)}. Nothing keeps a second process out of this folder now")
                return None
            raise ValueError(f"cannot write to the run folder {run}: {error.strerror}; choose another with {option} DIR") from None
        try:
            seize(handle)
        except OSError as error:
            owner = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
                return None  # a file system without locks
            raise ValueError(
                f"the run folder {run} is in use{f' by {owner}' if owner else ''}; a folder takes one process: wait until it has ended, "
                f"end it, or choose another with {option} DIR"
            ) from None
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), path.stat()):  # else whoever had it has just deleted it
                os.ftruncate(handle, 0)
                with suppress(OSError):
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return handle
        os.close(handle)
