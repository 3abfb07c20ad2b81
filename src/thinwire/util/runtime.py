"""Time, threads and waiting of one worker. Whatever waits is handed one of these, so that a simulation can hand in another."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

T = TypeVar("T")


class Runtime:
    """The machine's own clock and threads."""

    now: Callable[[], float] = staticmethod(time.monotonic)
    """Return monotonic seconds."""
    sleep: Callable[[float], None] = staticmethod(time.sleep)
    """Let so much time pass."""
    uniform: Callable[[float, float], float] = staticmethod(random.uniform)
    """Draw a number between two, so that those who wait for the same thing do not all come at once."""
    lock: Callable[[], threading.Lock] = staticmethod(threading.Lock)
    """Make a lock that several conditions share."""
    condition: Callable[..., threading.Condition] = staticmethod(threading.Condition)
    """Make a condition, of a lock of its own or of one that several share."""
    event: Callable[[], threading.Event] = staticmethod(threading.Event)
    """Make an event."""

    def thread(self, name: str, target: Callable[[], None], *, daemon: bool = True) -> threading.Thread:
        """Make a thread, which does not keep the process alive unless it is no `daemon`; `start` begins it."""
        return threading.Thread(target=target, name=name, daemon=daemon)

    def end_process(self, code: int) -> NoReturn:
        """End this process at once, whatever its other threads do."""
        os._exit(code)

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Make several calls at the same time; return what each returned."""
        results: dict[int, T] = {}

        def run(number: int, call: Callable[[], T]) -> None:
            results[number] = call()

        threads = [self.thread(f"thinwire-call {number}", partial(run, number, call)) for number, call in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[number] for number in range(len(calls))]


REAL = Runtime()
