"""Keep a third party's troubles away from the training: a tracker that fails is named once and left out from then on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from thinwire.metrics.track import Tracker
from thinwire.util.notices import say_aloud


class Guarded(Tracker):
    """Hand everything on to a tracker until it fails."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.tracker: Tracker | None = tracker

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if self.tracker is None:
            return
        try:
            self.tracker.log(step, values)
        except Exception as error:  # it is not ours: it may raise anything, and a curve is not worth a run
            failed, self.tracker = self.tracker, None
            self.report(f"failed at step {step} and is switched off", error)
            with suppress(Exception):  # what has just failed may well fail again
                failed.close()

    def close(self) -> None:
        if self.tracker is None:
            return
        closing, self.tracker = self.tracker, None
        try:
            closing.close()
        except Exception as error:  # as above
            self.report("could not write its last values", error)

    def report(self, what: str, error: Exception) -> None:
        """Say on standard error what happened, and where the values are."""
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        say_aloud(f"thinwire: tracker {self.name} {what}: {reason}; metrics/ in the run folder has every step")
