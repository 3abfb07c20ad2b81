"""When a link calls its peer: one attempt at a time, with back-off and jitter. Times are handed in; the transport does the calling."""

from __future__ import annotations

import logging
from collections.abc import Callable

from thinwire.link.options import LinkOptions
from thinwire.link.problem import NO_ATTEMPT, Problem, Unreached
from thinwire.link.transport import ByteStream

LOG = logging.getLogger("thinwire.link")


class Dialer:
    """At most one attempt at a time. Whatever answers, it goes on trying: who is at an address now need not be there in a minute."""

    def __init__(self, begin: Callable[..., ByteStream], options: LinkOptions, uniform: Callable[[float, float], float]) -> None:
        """`begin` makes a stream, after looking the address up again (`resolve`); `uniform` draws the jitter."""
        self._begin, self._options, self._uniform = begin, options, uniform
        self.stream: ByteStream | None = None
        """What is being made."""
        self._deadline = 0.0
        self._retry_at = float("-inf")
        self._failures = 0
        self._problem = NO_ATTEMPT
        self._told = ""

    @property
    def problem(self) -> Problem:
        """Return why the last attempt failed, or how far the first one has come."""
        return self._problem if self.stream is None or self._problem is not NO_ATTEMPT else self.stream.problem

    @property
    def next_at(self) -> float:
        """Return when `tend` has something to do, if a connection is wanted."""
        return self._retry_at if self.stream is None else self._deadline

    def tend(self, now: float, *, resolve: bool) -> None:
        """Start an attempt when its time has come; end one that takes too long."""
        if self.stream is not None:
            if now >= self._deadline:
                self.failed(self.stream.problem, now)
        elif now >= self._retry_at:
            self._deadline = now + self._options.establish_seconds
            try:
                self.stream = self._begin(resolve=resolve)
            except Unreached as error:
                self.failed(error.problem, now)

    def go_on(self, now: float) -> ByteStream | None:
        """Go on with the attempt; return a finished stream."""
        assert self.stream is not None
        try:
            if not self.stream.ready():
                return None
        except Unreached as error:
            self.failed(error.problem, now)
            return None
        finished, self.stream = self.stream, None
        return finished

    def failed(self, problem: Problem, now: float) -> None:
        """End the attempt and wait before the next one."""
        self._problem = problem
        if not problem.patience and problem.text != self._told:  # waiting alone will hardly help, so somebody should know at once
            self._told = problem.text
            LOG.warning("%s; trying again", problem)
        self.cancel()
        self.back_off(now)

    def back_off(self, now: float, problem: Problem | None = None) -> None:
        """Pause before the next attempt; a connection that was made may have had a problem."""
        self._problem = problem or self._problem
        pause = min(self._options.backoff_limit_seconds, self._options.backoff_seconds * 2 ** min(self._failures, 16))
        self._failures += 1
        self._retry_at = now + pause * self._uniform(0.5, 1.0)

    def succeeded(self) -> None:
        """Forget earlier failures."""
        self._failures, self._told = 0, ""

    def cancel(self) -> None:
        """Drop an attempt that is under way."""
        if self.stream is not None:
            self.stream.end("close")
        self.stream = None
