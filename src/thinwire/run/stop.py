"""The wish to end: from a signal, or from a supervisor where one stands between."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from thinwire.util.console import closing_console

SOON = "stopping after the step under way; Ctrl-C again ends at once"
NOW = "stopping: the step under way is given up"
TAKEN = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))
"""Signals that are taken: Ctrl-C, the usual request to end, and Ctrl-Break, which only Windows has."""


class Stop:
    """Remember that someone asked the run to end: after the step under way (Ctrl-C), or at once (SIGTERM, Ctrl-Break, a closed console)."""

    def __init__(self, supervised: bool = False) -> None:
        self.supervised = supervised
        self.asked = False
        self.now = False
        """Whether the step under way is to be abandoned."""
        self.tell: Callable[[str], None] | None = None
        """Told, by another thread, what a signal leads to."""
        self.at_once = False
        """Whether nothing more is to be waited for: a second Ctrl-C."""
        self._abandon: Callable[[], None] | None = None
        self._signals: socket.socket | None = None
        self._presses = self._interrupts = 0  # as the handler counts Ctrl-C, and as whoever catches up does: each sees every one

    def ask(self, number: int, frame: object) -> None:
        """Take a signal."""
        self._presses += number == signal.SIGINT
        if self._presses > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        now = number != signal.SIGINT
        if self.tell is not None:  # not here: the signal may have interrupted whoever is printing
            threading.Thread(target=self.tell, args=(NOW if now else SOON,), daemon=True).start()
        self.wish(now=now)

    def wish(self, *, now: bool) -> None:
        """Ask the run to end."""
        how = self._abandon if now and not self.now else None
        self.asked, self.now = True, self.now or now
        if how is not None:
            how()

    def catch_up(self) -> None:
        """Take the signals that the main thread could not take, because it is stuck: for another thread, which looks now and then."""
        with suppress(OSError, AttributeError):  # nothing has come, or nobody listens any more
            for number in self._signals.recv(64):  # type: ignore[union-attr]
                self._interrupts += number == signal.SIGINT
                self.wish(now=number != signal.SIGINT)
        self.at_once = self.at_once or self._interrupts > 1

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
        """Turn signals and the closing of a console into a wish to stop; a second Ctrl-C stops at once."""
        elsewhere = threading.current_thread() is not threading.main_thread()  # which alone takes signals
        if self.supervised or elsewhere or self._signals is not None:
            yield
            return
        # Python calls a handler only when the main thread gets there; the byte for this socket is written even if it never does.
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        before = {number: signal.signal(number, self.ask) for number in TAKEN}
        woken = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._signals = ours
        try:
            with closing_console(partial(self.wish, now=True)):
                yield
        finally:
            self._signals = None
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            ours.close()
            theirs.close()
