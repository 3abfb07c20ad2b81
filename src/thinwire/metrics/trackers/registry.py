"""Trackers by name, for `--track`: which exist, what they need, and how they are opened for a run.

The metrics file is not among them: it is always written. A tracker's package is loaded only when its name was given.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.config.sections import RunConfig

if TYPE_CHECKING:
    from thinwire.metrics.track import Tracker

TRACKERS = {"tensorboard": ("TensorBoard", "track"), "trackio": ("Trackio", "trackio")}
"""For each name, which is also that of its module here and of the package it needs: the class, and the extra that installs the package."""


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each once; raise ValueError for one that does not exist."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"--track {name}: there is no such tracker; choose from {', '.join(TRACKERS)}; metrics/*.jsonl is always written"
            )
    return tuple(dict.fromkeys(names))


@contextmanager
def open_trackers(names: Sequence[str], run: Path, config: RunConfig, *, resume: bool) -> Iterator[list[Tracker]]:
    """Open trackers for a run, and close them whatever happens; raise ValueError where a package is missing."""
    from thinwire.metrics.trackers.guard import Guarded  # not at the top: the words of a command need only the names

    kinds = {name: load(name) for name in check_names(names)}
    with ExitStack() as stack:
        yield [stack.enter_context(Guarded(name, kind(run, config, resume=resume))) for name, kind in kinds.items()]


def load(name: str) -> type:
    """Import a tracker and with it the package it needs."""
    kind, extra = TRACKERS[name]
    try:
        return getattr(importlib.import_module(f"thinwire.metrics.trackers.{name}"), kind)
    except ImportError as error:
        raise ValueError(
            f"--track {name} needs the package {name}, which cannot be imported ({error}); install it, in the "
            f"checkout, with: pip install -c constraints.txt -e '.[{extra}]'"
        ) from error
