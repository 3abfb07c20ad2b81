"""What operating systems differ in, each difference once and asked by capability: locks, places in files, private files, replacement.

What the console of Windows needs besides is in `console.py`.
"""

from __future__ import annotations

import getpass
import os
import stat
import subprocess
import time
from importlib import import_module
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

FAR_BYTE = 1 << 20
"""Where Windows locks a byte: not where others read whose lock it is."""
IN_USE = (5, 32)
"""Errors of Windows for a file that someone has open: access denied, sharing violation."""
PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between tries to replace a file that someone has open there: readers of ours hold one for a moment."""


def seize(handle: int) -> None:
    """Lock an open file until it is closed, or raise OSError at once."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    windows = import_module("msvcrt")
    os.lseek(handle, FAR_BYTE, os.SEEK_SET)
    windows.locking(handle, windows.LK_NBLCK, 1)
    os.lseek(handle, 0, os.SEEK_SET)


def write_at(file: int, data: memoryview, place: int) -> int:
    """Write to a place of a file; return the bytes that it took. One thread at a time, as for all of these three."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, place)
    os.lseek(file, place, os.SEEK_SET)
    return os.write(file, data)


def read_at(file: int, data: memoryview, place: int) -> int:
    """Fill a buffer from a place of a file; return the bytes that it gave."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [data], place)
    os.lseek(file, place, os.SEEK_SET)
    with open(file, "rb", buffering=0, closefd=False) as raw:
        return raw.readinto(data) or 0


def leave_page_cache(file: int, place: int, size: int, *, written: bool) -> None:
    """Have what was written or read leave the page cache; where a system has no word for that, it stays."""
    if written:  # only what is on the disk can leave it
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, place, size, os.POSIX_FADV_DONTNEED)


def has_owners() -> bool:
    """Tell whether files have an owner and bits that say who may read them; elsewhere there are access lists."""
    return hasattr(os, "getuid")


def is_private_folder(path: Path) -> bool:
    """Tell whether a path is a folder, no link, of this user that nobody else can read, as far as its bits say."""
    about = path.lstat()
    return stat.S_ISDIR(about.st_mode) and (not has_owners() or (about.st_uid == os.getuid() and not about.st_mode & 0o077))


def make_private(path: Path) -> None:
    """Let nobody but this user read a new file; where files have owners the mode it was made with has done so."""
    if has_owners():
        return
    user = _run("whoami", "/user", "/fo", "csv", "/nh").strip().rpartition(",")[2].strip('"') or getpass.getuser()
    _run("icacls", str(path), "/inheritance:r", "/grant:r", f"{'*' if user.startswith('S-') else ''}{user}:F")


def _run(*words: str) -> str:
    """Run a program of the system; return what it prints."""
    try:
        return subprocess.run(words, capture_output=True, text=True, errors="replace", check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise ValueError(
            f"`{' '.join(words)}` failed, so a key cannot be kept from other users: {str(said).strip()}; "
            "choose a folder on a disk with access lists (NTFS)"
        ) from None


def replace_file(source: Path, target: Path) -> None:
    """Put a file in the place of another; where an open file cannot be replaced, wait for whoever has it open."""
    for pause in (*PAUSES, None):
        try:
            os.replace(source, target)
            return
        except PermissionError as error:
            if pause is None or getattr(error, "winerror", None) not in IN_USE:
                raise
        time.sleep(pause)
