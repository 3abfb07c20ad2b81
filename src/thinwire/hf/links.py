"""Which files of a folder may be read or copied: those in it. A link that leads out is refused, one inside the Hugging Face cache is not.

A folder that somebody else made could link to any file of this machine, which an import would keep and an export would publish. In the
Hugging Face cache a model's folder consists of links, `models--NAME/snapshots/REVISION/FILE` to `models--NAME/blobs/HASH`, and in newer
versions from there on to the store `blobs/HH/HASH` beside all models: these are followed, and no others.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

SHARED_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


def is_inside(folder: Path, path: Path) -> bool:
    """Tell whether a path of a folder, all links followed, stays in it or in the part of the Hugging Face cache that belongs to it."""
    home, target = folder.resolve(), path.resolve()
    if target.is_relative_to(home):
        return True
    model = home.parent.parent
    if home.parent.name != "snapshots" or not model.name.startswith("models--"):
        return False
    shared = model.parent / "blobs"
    return target.parent == model / "blobs" or (
        target.is_relative_to(shared) and SHARED_BLOB.fullmatch(target.relative_to(shared).as_posix()) is not None
    )


def has_file(folder: Path, name: str) -> bool:
    """Tell whether a folder has a file of this name; refuse one that leads out of it, and what is no file."""
    path = folder / name
    if not is_inside(folder, path):
        raise ValueError(
            f"{path} is a link to {path.resolve()}, outside {folder}, and was not read; if that file belongs there, put the file itself in "
            "its place (cp -L). Links inside the Hugging Face cache are followed: give its snapshots/REVISION folder as it is"
        )
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file; download or export the folder again")
    return path.is_file()


def copy_file(folder: Path, name: str, to: Path) -> bool:
    """Copy a file of a folder into another folder under the same name, if it is there; return whether it was."""
    there = has_file(folder, name)
    if there:
        shutil.copyfile(folder / name, to / name)
    return there
