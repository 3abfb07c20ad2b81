"""The last words of a run that was stopped: what was kept, and what to type to go on. The same in every mode."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire import checkpoint
from thinwire.files import matching

EVERYWHERE = "\n(on every machine, each with its own command)"


def go_on_command(verb: str, run: Path, words: Iterable[str] = ()) -> str:
    """Write the command that goes on with a run, as a shell takes it."""
    return shlex.join(["thinwire", verb, *words, "--run", str(run), "--resume"])


def last_words(summary: dict[str, Any], run: Path, command: str, everywhere: bool = False) -> str:
    """Say where a run was stopped, what is kept of it and what to type."""
    return f"stopped at step {summary['steps']}; {kept(run)}\ngo on with: {command}{EVERYWHERE if everywhere else ''}"


def kept(run: Path) -> str:
    """Name the newest checkpoint in a run folder."""
    folders = [folder for folder in checkpoint.steps(run) if matching(folder, "stage-*.json")]
    return f"kept: {shlex.quote(str(folders[-1]))}" if folders else "there was no checkpoint yet"


@contextmanager
def farewell(run: Path, command: str) -> Iterator[None]:
    """When people do not wait for the end of a stop, say what is kept all the same."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped at once; {kept(run)}\ngo on with: {command}", file=sys.stderr, flush=True)
        raise
