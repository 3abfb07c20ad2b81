"""The wish to end: from a signal, or from a supervisor where one stands between."""

from __future__ import annotations

import signal
from contextlib import contextmanager


class Stop:
    """Remember that someone asked the run to end: by a signal, or a supervisor where one stands between."""

    def __init__(self, supervised: bool = False) -> None:
        self.supervised = supervised
        self.asked = False

    def ask(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def listening(self):
        """Turn SIGINT and SIGTERM into a wish to stop; a second Ctrl-C stops at once."""
        numbers = () if self.supervised else (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
