"""The connections of a link on which the peer's HELLO has not come yet, and the verdict on each. Part of the link's I/O thread.

What is in use stays so until a newcomer is judged: it may be a second process of the peer with other settings, or a copy of its machine.
An end that was called answers after the verdict. One that dials, because of doubts, says HELLO first: it puts what it has aside meanwhile,
because what came in there would not be in its HELLO.
"""

from __future__ import annotations

import logging
import selectors
import ssl
import time
from typing import TYPE_CHECKING

from thinwire.link.connection import Connection
from thinwire.link.errors import (
    Abort,
    Interrupted,
    LinkError,
    ProtocolError,
    Replaced,
    Stopping,
    aborted,
    decode_abort,
    encode_abort,
    refused,
)
from thinwire.link.frame import Frame, Kind, Parser
from thinwire.link.greeting import Greeting
from thinwire.link.hello import Hello, PeerBehind, PeerReplaced, decode_hello, judge, make_hello
from thinwire.link.problem import Problem

if TYPE_CHECKING:
    from thinwire.link.loop import Loop

LOG = logging.getLogger("thinwire.link")
MOST_GREETINGS = 4
"""Connections that may wait for the peer's HELLO; all of them have its certificate."""
WARNING_SECONDS = 1.0
"""Time between two warnings about connections that are not used."""


class Reception:
    """Greet on new connections, and decide which one the loop uses."""

    def __init__(self, loop: Loop, newest: int | None) -> None:
        self._loop = loop
        self.newest = newest
        """The newest incarnation of the peer that was ever met, on an earlier link too."""
        self.incarnation: int | None = None
        """The one that this link was opened with."""
        self.greetings: list[Greeting] = []
        """The oldest first."""
        self._parked: tuple[Connection, Parser] | None = None
        self._warned, self._warned_at = "", float("-inf")

    def begin(self, connection: Connection) -> None:
        """Greet the peer on a new connection."""
        loop, now = self._loop, time.monotonic()
        if loop.dialer is not None and loop.connection is not None and not loop.telling:
            self._park(now)
        greeting = Greeting(connection, loop.contract, now + loop.options.establish_seconds)
        loop.meter.absorb(connection.meter)
        connection.meter = loop.meter
        self.greetings.append(greeting)
        loop.selector.register(connection.socket, selectors.EVENT_READ, lambda: loop.take_in(greeting, connection.read))
        if len(self.greetings) > MOST_GREETINGS:
            self._dismiss(self.greetings[0], Problem(f"no HELLO before {MOST_GREETINGS} other connections came"))
            if greeting not in self.greetings:  # to go on with it was tried, and it does not work
                return
        if loop.telling:
            if greeting.said or self._say_hello(greeting, now):
                self._use(greeting, now)
            return
        if loop.connection is None:
            loop.state = "hello"
            if not greeting.said and not self._say_hello(greeting, now):
                return
        loop.take_in(greeting, connection.records)  # HELLO may have come with the handshake

    def _park(self, now: float) -> None:
        """Put the doubtful connection aside."""
        loop = self._loop
        assert loop.connection is not None and loop.parser is not None
        loop.selector.unregister(loop.connection.socket)
        self._parked = (loop.connection, loop.parser)
        loop.connection = None
        loop.broken_since = now

    def hello(self) -> Hello:
        """Describe this end as it is now."""
        loop = self._loop
        return make_hello(loop.terms, loop.contract.epoch, loop.options, loop.inbox.received, loop.inbox.consumed(), self.newest or 0)

    def _say_hello(self, greeting: Greeting, now: float) -> bool:
        """Send our HELLO; return whether that was possible."""
        try:
            greeting.say(self._loop.frame(Kind.HELLO, self.hello().encode()), now)
        except OSError as error:
            self._dismiss(greeting, Problem(f"sending HELLO failed: {error.strerror or error}"))
            return False
        return True

    def lost(self, now: float) -> None:
        """Go on with those who wait, now that nothing is in use."""
        for greeting in list(self.greetings):
            if greeting in self.greetings and not greeting.said:  # one that cannot be told is dismissed, and others are then gone on with
                self._say_hello(greeting, now)

    def tell(self) -> None:
        """Use a connection that has our HELLO for a last word, if there is no other."""
        said = [greeting for greeting in self.greetings if greeting.said]
        if self._loop.connection is None and said:
            self._use(said[-1], time.monotonic())

    def end_overdue(self, now: float) -> None:
        for greeting in [greeting for greeting in self.greetings if now >= greeting.deadline]:
            self._dismiss(greeting, Problem(f"no HELLO within {self._loop.options.establish_seconds} s"))

    def take(self, greeting: Greeting, frame: Frame) -> None:
        """Compare the peer's HELLO with ours and open, or say what differs."""
        loop, now = self._loop, time.monotonic()
        if frame.header.kind is Kind.ABORT:
            self._refuse(greeting, aborted(f"{loop.peer} aborted the link", *decode_abort(frame.payload)), told=True)
            return
        theirs = decode_hello(frame.payload)
        try:
            judge(self.hello(), theirs, loop.peer, self.newest, heard=self.incarnation is not None)
            loop.outbox.rewind(theirs.received, theirs.consumed)
        except PeerBehind as error:
            self._dismiss(greeting, Problem(str(error)))
        except PeerReplaced as error:
            LOG.info("%s was turned away: %s", loop.peer, error)
            self._turn_away(greeting, str(error), Abort.REPLACED, tell=True)
        else:
            if not greeting.said:
                loop.drop()  # from here on nothing comes in that our HELLO would not count
                if not self._say_hello(greeting, now):
                    return
            self._use(greeting, now)
            self.incarnation = self.newest = theirs.incarnation
            self._warned = ""
            loop.is_open()

    def failed(self, greeting: Greeting, error: OSError) -> None:
        """Act on a frame that is refused, or on a connection that is lost."""
        loop = self._loop
        if isinstance(error, LinkError):
            self._refuse(greeting, error)
        elif isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            # the peer has finished its handshake only when it answers: its refusal of our certificate arrives here
            refusal = refused(loop.peer, error, loop.dialer.fingerprint if loop.dialer else "")
            self._refuse(greeting, refusal, told=True, refusal=True)
        else:
            reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            self._dismiss(greeting, Problem(f"{reason or error}"))

    def _refuse(self, greeting: Greeting, error: LinkError, *, told: bool = False, refusal: bool = False) -> None:
        """Refuse a greeting, or be refused by it (`told`), perhaps because of who this worker is (`refusal`).

        That is the end of a link that never was. A peer that was met before is still there, or is waited for: this may be a second
        process of it, or it was started again with other settings. Only one that lost its state, or has moved on, ends the epoch.
        """
        loop, now = self._loop, time.monotonic()
        if self.newest is not None and (type(error) is LinkError or isinstance(error, ProtocolError)):
            if str(error) != self._warned and now >= self._warned_at + WARNING_SECONDS:  # the other end decides how often it tries
                self._warned, self._warned_at = str(error), now
                LOG.warning("a connection of %s was not used: %s", loop.peer, error)
            self._turn_away(greeting, str(error), error.code, tell=not told, refusal=refusal)
            return
        ahead = isinstance(error, (Replaced, Stopping)) or (isinstance(error, Interrupted) and error.epoch > 0)
        tell = not told and not ahead  # a peer that is ahead waits for this worker to follow
        if tell and (greeting.said or self._say_hello(greeting, now)):
            self._use(greeting, now)
        loop.fail(error, tell=tell)

    def _turn_away(self, greeting: Greeting, reason: str, code: Abort, *, tell: bool, refusal: bool = False) -> None:
        """Do without a connection and go on; the peer gets our HELLO as well, so that it can name the difference as seen from there."""
        now = time.monotonic()
        if tell and (greeting.said or self._say_hello(greeting, now)):
            greeting.refuse(self._loop.frame(Kind.ABORT, encode_abort(code, reason)), now)
        if greeting in self.greetings:
            remedy = "start it with the settings and the roster of the others"
            self._dismiss(greeting, Problem(reason, remedy, patience=False, refusal=refusal))

    def _use(self, greeting: Greeting, now: float) -> None:
        """Let the loop use this connection from now on, and no other; older ones, and those that got our HELLO, know an older state."""
        loop, place = self._loop, self.greetings.index(greeting)
        self.greetings.remove(greeting)
        loop.drop()
        if self._parked is not None:
            self._parked[0].close()
            self._parked = None
        for other in [other for number, other in enumerate(self.greetings) if other.said or number < place]:
            self._remove(other)
        greeting.check = loop.check
        loop.use(greeting.connection, greeting.parser, now)

    def _remove(self, greeting: Greeting) -> None:
        self.greetings.remove(greeting)
        self._loop.selector.unregister(greeting.connection.socket)
        greeting.connection.close()

    def _dismiss(self, greeting: Greeting, problem: Problem) -> None:
        """Give a connection up that is not in use; go on with the one that was put aside for it."""
        loop = self._loop
        self._remove(greeting)
        LOG.info("gave up a connection to %s: %s", loop.peer, problem.text)
        if self._parked is not None and not self.greetings:
            (connection, parser), self._parked = self._parked, None
            loop.selector.register(connection.socket, selectors.EVENT_READ)
            loop.use(connection, parser, time.monotonic())
            loop.state = "open"
        loop.do_without(problem)

    def close(self) -> None:
        """Leave nothing behind."""
        for greeting in self.greetings:
            greeting.connection.close()
        if self._parked is not None:
            self._parked[0].close()
