"""The wish to end: from a signal, or from a supervisor where one stands between."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Abandoned(Exception):
    """The step under way is given up: what was committed before it is what counts."""


class Stop:
    """Remember that someone asked the run to end: after the step under way (Ctrl-C), or at once (SIGTERM)."""

    def __init__(self, supervised: bool = False) -> None:
        self.supervised = supervised
        self.asked = False
        self.now = False
        """Whether the step under way is to be abandoned."""
        self._abandon: Callable[[], None] | None = None

    def ask(self, number: int, frame: object) -> None:
        """Take a signal."""
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wish(now=number == signal.SIGTERM)

    def wish(self, *, now: bool) -> None:
        """Ask the run to end."""
        how = self._abandon if now and not self.now else None
        self.asked, self.now = True, self.now or now
        if how is not None:
            how()

    @contextmanager
    def abandoning(self, how: Callable[[], None]) -> Iterator[None]:
        """Inside this block a wish to end at once calls `how`, which makes whoever computes or waits give up."""
        self._abandon = how
        try:
            if self.now:
                how()
            yield
        finally:
            self._abandon = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into a wish to stop; a second Ctrl-C stops at once."""
        numbers = () if self.supervised else (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
