"""Open the trackers of `--track` for a run.

The metrics file is not among them: it is always written. A tracker's package is loaded only when its name was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.config.registry import TRACKERS
from thinwire.config.sections import RunConfig

if TYPE_CHECKING:
    from thinwire.metrics.track import Tracker

EXTRAS = {"tensorboard": "track", "trackio": "trackio", "wandb": "wandb"}
"""The extra that installs the package of a tracker, which has the tracker's name."""


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each once; raise ValueError for one that does not exist."""
    for name in names:
        if name not in TRACKERS.names():
            raise ValueError(
                f"--track {name}: there is no such tracker; choose from {', '.join(TRACKERS.names())}; metrics/*.jsonl is always written"
            )
    return tuple(dict.fromkeys(names))


@contextmanager
def open_trackers(names: Sequence[str], run: Path, config: RunConfig, *, resume: bool) -> Iterator[list[Tracker]]:
    """Open trackers for a run, and close them whatever happens; raise ValueError where a package is missing."""
    from thinwire.metrics.trackers.guard import Guarded  # not at the top: the options of a command need only the names

    kinds = {name: load_tracker(name) for name in check_names(names)}
    with ExitStack() as stack:
        yield [stack.enter_context(Guarded(name, kind(run, config, resume=resume))) for name, kind in kinds.items()]


def load_tracker(name: str) -> type:
    """Import a tracker and with it the package it needs."""
    try:
        return TRACKERS.load(name)
    except ImportError as error:
        raise ValueError(
            f"--track {name} needs the package {name}, which cannot be imported ({error}); install it, in the "
            f"checkout, with: pip install -c constraints.txt -e '.[{EXTRAS[name]}]'"
        ) from error
