"""Find a worker that is stuck: its computing thread neither gets on nor waits for a neighbour.

Signs of life of other threads say nothing about the one that computes. What counts is its progress: steps, runs of the engine, frames that
it sends and takes. While it waits for a neighbour it is that one's turn to be judged, by its own watchdog. How long a calculation may take
follows from how long such calculations took before, so a slow worker is not a stuck one. Getting ready, writing checkpoints and
summing up have no limit: they depend on data and disks. The process that is stuck ends itself, so that another can take its place.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from thinwire.cluster.neighbours import Neighbours
from thinwire.link.errors import Abort
from thinwire.run.stop import Stop

LOOK_SECONDS = 1.0
"""Time between two looks."""
FACTOR = 20.0
"""A calculation may take so many times as long as the longest of its kind."""
NEW_FACTOR = 10.0
"""One of a kind that was never done before may take so many times the limit of the others."""
FADING = 0.97
"""Share of the longest time that is still believed after another calculation: one slow moment is not for ever."""
STOP_SECONDS = 5.0
"""How long a worker that was asked to end at once may go on, unless one calculation takes longer."""
PATIENT_LOOKS = 3
"""So many looks a worker that was asked to end may wait for its neighbours."""
CALCULATIONS = ("first steps", "step", "validation")
"""What is judged. The first two steps of a process may take much longer than those after them, and are measured for these."""
START = "start"
TELL_SECONDS = 2.0
"""How long a process that ends itself tries to tell its neighbours."""
EXIT_STUCK = 75
"""Exit code of a worker that ended because it was stuck: as for other passing failures, a new start may help."""
EXIT_INTERRUPTED = 130

Sign = tuple[str, int, int]
"""What a worker does, the steps it has done, and its runs of the engine."""


class Patience:
    """Judge how long the present calculation may take by how long those before it took; knows no clock and no thread."""

    def __init__(self, seconds: float) -> None:
        """Never call a calculation stuck that takes less than so many seconds."""
        self.seconds = seconds
        self.expected = 0.0
        """Seconds of a microbatch as they were measured before the first step."""
        self.streak = 0.0
        """Seconds since the last progress."""
        self.longest: dict[str, float] = {}
        """Longest streak of each kind of calculation, of those that are over."""
        self._worst = 0.0
        self._doing, self._step, self._seen = START, 0, object()

    def look(self, doing: str, step: int, seen: object, elapsed: float, *, waiting: bool) -> None:
        """Take what a worker does; `seen` differs whenever it has got on, and `elapsed` seconds have gone by since the last look."""
        if seen == self._seen and doing == self._doing and step == self._step and not waiting:
            self.streak += elapsed
            self._worst = max(self._worst, self.streak)
            return
        self.streak = 0.0
        if (doing, step) != (self._doing, self._step):
            self.longest[self._doing] = max(self._worst, FADING * self.longest.get(self._doing, 0.0))
            self._worst = 0.0
        self._doing, self._step, self._seen = doing, step, seen

    @property
    def limit(self) -> float:
        """Return the seconds without progress after which the present calculation is stuck."""
        if self._doing in self.longest or self._doing == "step":
            return max(self.seconds, FACTOR * self.longest.get(self._doing, self.longest.get("first steps", 0.0)))
        known = max([self.expected, *(self.longest.get(kind, 0.0) for kind in CALCULATIONS)])
        return max(NEW_FACTOR * self.seconds, FACTOR * known)

    @property
    def end_limit(self) -> float:
        """Return the seconds without progress after which a worker that was asked to end is not waited for any more."""
        return max(STOP_SECONDS, 2 * self.longest.get(self._doing, 0.0)) if self._doing != START else STOP_SECONDS


class Watchdog:
    """Look after the thread that makes it, from a thread of its own."""

    def __init__(self, neighbours: Neighbours, stop: Stop, seconds: float, tell: Callable[[str], None]) -> None:
        """`tell` is told why this process ends, just before it does."""
        self.neighbours, self.stop, self.tell = neighbours, stop, tell
        self.runtime, self.patience = neighbours.endpoint.runtime, Patience(seconds)
        self.pause = min(LOOK_SECONDS, seconds / 8)
        self.sign: Callable[[], Sign] | None = None
        self.watched = threading.get_ident()
        self.asked_seconds = self.at_once_seconds = 0.0
        self.waited = 0
        self.over = self.runtime.event()
        self.thread = self.runtime.thread("thinwire-watchdog", self._watch)

    def follow(self, sign: Callable[[], Sign] | None, expected: float = 0.0) -> None:
        """Judge by this sign from now on; None: the worker gets ready. `expected` are the measured seconds of a microbatch."""
        self.sign, self.patience.expected = sign, max(0.0, expected)

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        before = self.runtime.now()
        while not self.over.wait(self.pause):
            now = self.runtime.now()
            elapsed = min(now - before, 2 * self.pause)  # the whole process was stopped, or the machine slept: nobody could get on
            before = now
            self._look(elapsed)
            if not self.stop.supervised and sys.__stderr__ is not None:
                # Where the computing thread keeps Python's lock this thread cannot look any more. A supervisor hears that; without one
                # it takes a thread outside Python, which says where all threads are and ends the process, unless it is told again.
                faulthandler.dump_traceback_later(NEW_FACTOR * self.patience.seconds, exit=True, file=sys.__stderr__)
        faulthandler.cancel_dump_traceback_later()

    def _look(self, elapsed: float) -> None:
        """Take note of what the worker does, and end it if it is stuck, or does not end when asked to."""
        self.stop.catch_up()
        links = list(self.neighbours.opened.values())
        waiting = any(link.waiting for link in links)
        doing, step, runs = self.sign() if self.sign is not None else (START, 0, 0)
        patience = self.patience
        patience.look(doing, step, (runs, sum(link.crossings for link in links)), elapsed, waiting=waiting)
        if self.stop.asked:
            self._hasten(doing, elapsed, waiting)
        if not self.over.is_set() and doing in CALCULATIONS and patience.streak > patience.limit:
            self._leave(
                f"is stuck: {_said(doing, step)} has not got on for {patience.streak:.0f} s (limit {patience.limit:.0f} s)", EXIT_STUCK
            )

    def _hasten(self, doing: str, elapsed: float, waiting: bool) -> None:
        """See to it that a worker ends which was asked to."""
        if doing == START:  # there is no step under way to wait for
            self.stop.wish(now=True)
        if self.stop.at_once:
            self.at_once_seconds += elapsed
        if self.stop.now:
            self.asked_seconds += elapsed
        self.waited = self.waited + 1 if self.stop.now and waiting else 0
        if self.stop.now and (doing == START or self.waited > PATIENT_LOOKS):
            self.neighbours.interrupt()
        busy = min(self.asked_seconds, self.patience.streak)
        if self.at_once_seconds > STOP_SECONDS:
            self._leave("was asked twice to end and did not", EXIT_INTERRUPTED)
        elif self.stop.now and doing in (START, *CALCULATIONS) and busy > self.patience.end_limit:
            self._leave(f"was asked to end and has not got on for {busy:.0f} s", 0)

    def _leave(self, why: str, code: int) -> None:
        """Say why and where, let the neighbours know, and end this process: its computing thread will not."""
        if self.over.is_set():
            return
        text = f"{self.neighbours.worker_id} {why}, at {where_is(self.watched)}"
        with suppress(OSError, ValueError):
            self.tell(text)
        links = list(self.neighbours.opened.values())
        for link in links:
            link.abort(text, Abort.STUCK)
        deadline = self.runtime.now() + TELL_SECONDS
        for link in links:
            link.wait_ended(max(0.0, deadline - self.runtime.now()))
        self.runtime.end_process(code)


def _said(doing: str, step: int) -> str:
    """Name a calculation for people; steps count from 1."""
    return f"the validation after step {step}" if doing == "validation" else f"step {step + 1}"


def where_is(thread: int, count: int = 4) -> str:
    """Say where a thread is: its innermost calls, the innermost first."""
    frame = sys._current_frames().get(thread)
    calls = traceback.extract_stack(frame)[::-1][:count] if frame is not None else []
    return " <- ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls) or "an unknown place"
