"""Make a whole new folder or none: it is filled under a hidden name beside its place and renamed at the end."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.util.files import files_below, sync


def refuse_existing(path: Path, word: str) -> None:
    """Raise ValueError if there is anything at a path that `word` names."""
    if os.path.lexists(path):
        raise ValueError(f"{word} {path} exists and is not overwritten; choose another folder, or delete that one first")


@contextmanager
def new_folder(path: Path, word: str) -> Iterator[Path]:
    """Yield a hidden folder that becomes `path` when the block ends well and is deleted when it does not, by Ctrl-C too."""
    refuse_existing(path, word)
    place = Path(os.path.abspath(path))
    missing = [folder for folder in place.parents if not folder.exists()]
    hidden = place.with_name(f".{place.name}.{os.getpid()}.{uuid.uuid4().hex}.partial")
    done = False
    try:
        hidden.mkdir(parents=True)
        yield hidden
        files = files_below(hidden)
        for written in (*files, *{parent for file in files for parent in file.parents if parent.is_relative_to(hidden)}, hidden):
            sync(written)
        refuse_existing(path, word)  # somebody else may have been faster
        hidden.rename(place)
        sync(place.parent)
        done = True
    finally:
        if not done:
            shutil.rmtree(hidden, ignore_errors=True)
            for parent in missing:
                if parent.exists() and not any(parent.iterdir()):
                    parent.rmdir()
