"""The last words of a run that was stopped: what was kept, and what to type to go on. The same in every mode."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire import checkpoint
from thinwire.run.folder import kept_by_all
from thinwire.util.files import matching
from thinwire.util.notices import say_aloud

EVERYWHERE = "\n(on every machine, each with its own command)"


def go_on_command(verb: str, run: Path, options: Iterable[str] = ()) -> str:
    """Write the command that goes on with a run, as a shell takes it."""
    return shlex.join(["thinwire", verb, *options, "--run", str(run), "--resume"])


def last_words(summary: dict[str, Any], run: Path, command: str, replicas: int | None) -> str:
    """Say where a run was stopped, what is kept of it and what to type; `replicas` as for `kept`."""
    return f"stopped at step {summary['steps']}; {kept(run, replicas)}\ngo on with: {command}{EVERYWHERE if replicas is None else ''}"


def kept(run: Path, replicas: int | None) -> str:
    """Name the newest checkpoint that all `replicas` of a run have whole; None: the others are elsewhere, and this folder has a part."""
    if replicas is None:
        folders, part = [folder for folder in checkpoint.steps(run) if matching(folder, "stage-*.json")], " (this machine's part)"
    else:
        folders, part = kept_by_all(run, replicas), ""
    return f"kept: {shlex.quote(str(folders[-1]))}{part}" if folders else "there was no checkpoint yet"


@contextmanager
def farewell(run: Path, command: str, replicas: int | None) -> Iterator[None]:
    """When people do not wait for the end of a stop, say what is kept all the same."""
    try:
        yield
    except KeyboardInterrupt:
        say_aloud(f"stopped at once; {kept(run, replicas)}\ngo on with: {command}")
        raise
