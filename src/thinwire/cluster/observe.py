"""Watch the links of a worker and report what people should know: who is waited for, who is there, who is silent, who is back."""

from __future__ import annotations

import time
from dataclasses import dataclass

from thinwire.cluster.neighbours import Neighbours
from thinwire.link.link import Link
from thinwire.link.peer import WorkerId
from thinwire.link.problem import NOT_CONNECTED
from thinwire.metrics.news import Report

LOOK_SECONDS = 0.2
SILENT_SECONDS = 1.0
"""A shorter absence is nobody's concern: the link resumes by itself."""
QUIET_PINGS = 3.0
"""A connection over which nothing came for as long as so many heartbeats take may be dead."""
REPEAT_SECONDS = 15.0
"""Time between two words about the same absence."""


@dataclass
class Sight:
    """What was last reported of a neighbour."""

    since: float | None = None
    """Since when it is away; None: it is there."""
    told_at: float | None = None
    """When that was last reported."""


class Observer:
    """Look at the links now and then; `look` does it once."""

    def __init__(self, neighbours: Neighbours, reconnect_seconds: float, report: Report) -> None:
        self.neighbours, self.limit, self.report = neighbours, reconnect_seconds, report
        self.runtime = neighbours.endpoint.runtime
        self.sights: dict[WorkerId, Sight] = {}
        self.met: set[WorkerId] = set()
        """Who was there at any time, in an earlier epoch too."""
        self.over = self.runtime.event()
        self.thread = self.runtime.thread("thinwire-observer", self._run)

    def start(self) -> None:
        """Look from now on."""
        self.thread.start()

    def end(self) -> None:
        """Look no more."""
        self.over.set()
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        while not self.over.wait(LOOK_SECONDS):
            self.look(self.runtime.now())

    def look(self, now: float) -> None:
        """Report what has changed since the last look."""
        for worker_id, link in list(self.neighbours.opened.items()):
            sight = self.sights.setdefault(worker_id, Sight())
            quiet = now - link.heard_at if link.heard_at else 0.0
            if link.state == "open" and quiet < QUIET_PINGS * link.options.ping_seconds:
                self._is_there(worker_id, link, sight, now)
            elif link.state == "open":  # not given up yet: some seconds of silence come before the reconnect window
                self._is_away(worker_id, link, sight, now, quiet, max(0.0, link.options.silent_seconds - quiet) + self.limit)
            elif away := link.absent_seconds:
                self._is_away(worker_id, link, sight, now, max(away, quiet), max(0.0, self.limit - away))

    def _is_there(self, worker_id: WorkerId, link: Link, sight: Sight, now: float) -> None:
        if worker_id not in self.met:
            if link.rtt is None:
                return  # the first answer is on its way
            self.met.add(worker_id)
            self.report({"connected": str(worker_id), "rtt": link.rtt})
        elif sight.since is not None and sight.told_at is not None:
            self.report({"back": str(worker_id), "after": now - sight.since})
        sight.since = sight.told_at = None

    def _is_away(self, worker_id: WorkerId, link: Link, sight: Sight, now: float, away: float, left: float) -> None:
        sight.since = now - away if sight.since is None else sight.since
        if now - sight.since < SILENT_SECONDS if sight.told_at is None else now - sight.told_at < REPEAT_SECONDS:
            return
        sight.told_at = now
        event = {"left": left, "problem": "" if link.problem == NOT_CONNECTED.text else link.problem}
        if worker_id in self.met:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - sight.since)))
            self.report({"silent": str(worker_id), "since": since, **event})
        else:
            self.report({"waiting": str(worker_id), "address": self.neighbours.dialled(worker_id), **event})
