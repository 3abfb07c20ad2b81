"""The connections of a link on which the peer's HELLO has not come yet, and the verdict on each. Part of the session.

What is in use stays so until a newcomer is judged: it may be a second process of the peer with other settings, or a copy of its machine.
An end that was called answers after the verdict. One that dials, because of doubts, says HELLO first: it puts what it has aside meanwhile,
because what came in there would not be in its HELLO.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from thinwire.link.connection import Connection
from thinwire.link.errors import (
    Abort,
    Alert,
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
    from thinwire.link.session import Session

LOG = logging.getLogger("thinwire.link")
MOST_GREETINGS = 4
"""Connections that may wait for the peer's HELLO; all of them have its certificate."""
WARNING_SECONDS = 1.0
"""Time between two warnings about connections that are not used."""


class Reception:
    """Greet on new connections, and decide which one the session uses."""

    def __init__(self, session: Session, newest: int | None) -> None:
        self._session = session
        self.newest = newest
        """The newest incarnation of the peer that was ever met, on an earlier link too."""
        self.incarnation: int | None = None
        """The one that this link was opened with."""
        self.greetings: list[Greeting] = []
        """The oldest first."""
        self._parked: tuple[Connection, Parser] | None = None
        self._warned, self._warned_at = "", float("-inf")

    def begin(self, connection: Connection, now: float) -> None:
        """Greet the peer on a new connection."""
        session = self._session
        if session.dialer is not None and session.connection is not None and not session.telling:
            self._park(now)
        greeting = Greeting(connection, session.contract, now + session.options.establish_seconds)
        session.meter.absorb(connection.meter)
        connection.meter = session.meter
        self.greetings.append(greeting)
        if len(self.greetings) > MOST_GREETINGS:
            self._dismiss(self.greetings[0], Problem(f"no HELLO before {MOST_GREETINGS} other connections came"), now)
            if greeting not in self.greetings:  # to go on with it was tried, and it does not work
                return
        if session.telling:
            if greeting.said or self._say_hello(greeting, now):
                self._use(greeting, now)
            return
        if session.connection is None:
            session.state = "hello"
            if not greeting.said and not self._say_hello(greeting, now):
                return
        session.take_in(greeting, now)  # HELLO may have come with the handshake

    def _park(self, now: float) -> None:
        """Put the doubtful connection aside."""
        session = self._session
        assert session.connection is not None and session.parser is not None
        self._parked = (session.connection, session.parser)
        session.connection = None
        session.broken_since = now

    def hello(self) -> Hello:
        """Describe this end as it is now."""
        session = self._session
        return make_hello(
            session.terms, session.contract.epoch, session.options, session.inbox.received, session.inbox.consumed(), self.newest or 0
        )

    def _say_hello(self, greeting: Greeting, now: float) -> bool:
        """Send our HELLO; return whether that was possible."""
        try:
            greeting.say(self._session.frame(Kind.HELLO, self.hello().encode()), now)
        except OSError as error:
            self._dismiss(greeting, Problem(f"sending HELLO failed: {error.strerror or error}"), now)
            return False
        return True

    def lost(self, now: float) -> None:
        """Go on with those who wait, now that nothing is in use."""
        for greeting in list(self.greetings):
            if greeting in self.greetings and not greeting.said:  # one that cannot be told is dismissed, and others are then gone on with
                self._say_hello(greeting, now)

    def tell(self, now: float) -> None:
        """Use a connection that has our HELLO for a last word, if there is no other."""
        said = [greeting for greeting in self.greetings if greeting.said]
        if self._session.connection is None and said:
            self._use(said[-1], now)

    def end_overdue(self, now: float) -> None:
        for greeting in [greeting for greeting in self.greetings if now >= greeting.deadline]:
            self._dismiss(greeting, Problem(f"no HELLO within {self._session.options.establish_seconds} s"), now)

    def take(self, greeting: Greeting, frame: Frame, now: float) -> None:
        """Compare the peer's HELLO with ours and open, or say what differs."""
        session = self._session
        if frame.header.kind is Kind.ABORT:
            self._refuse(greeting, aborted(f"{session.peer} aborted the link", *decode_abort(frame.payload)), now, told=True)
            return
        theirs = decode_hello(frame.payload)
        try:
            judge(self.hello(), theirs, session.peer, self.newest, heard=self.incarnation is not None)
            session.outbox.rewind(theirs.received, theirs.consumed)
        except PeerBehind as error:
            self._dismiss(greeting, Problem(str(error)), now)
        except PeerReplaced as error:
            LOG.info("%s was turned away: %s", session.peer, error)
            self._turn_away(greeting, str(error), Abort.REPLACED, now, tell=True)
        else:
            if not greeting.said:
                session.drop()  # from here on nothing comes in that our HELLO would not count
                if not self._say_hello(greeting, now):
                    return
            self._use(greeting, now)
            self.incarnation = self.newest = theirs.incarnation
            self._warned = ""
            session.is_open()

    def failed(self, greeting: Greeting, error: OSError, now: float) -> None:
        """Act on a frame that is refused, or on a connection that is lost."""
        session = self._session
        if isinstance(error, LinkError):
            self._refuse(greeting, error, now)
        elif isinstance(error, Alert):
            # the peer has finished its handshake only when it answers: its refusal of our certificate arrives here
            self._refuse(greeting, refused(session.peer, error, session.fingerprint), now, told=True, refusal=True)
        else:
            self._dismiss(greeting, Problem(f"{error.strerror or error}"), now)

    def _refuse(self, greeting: Greeting, error: LinkError, now: float, *, told: bool = False, refusal: bool = False) -> None:
        """Refuse a greeting, or be refused by it (`told`), perhaps because of who this worker is (`refusal`).

        That is the end of a link that never was. A peer that was met before is still there, or is waited for: this may be a second
        process of it, or it was started again with other settings. Only one that lost its state, or has moved on, ends the epoch.
        """
        session = self._session
        if self.newest is not None and (type(error) is LinkError or isinstance(error, ProtocolError)):
            if str(error) != self._warned and now >= self._warned_at + WARNING_SECONDS:  # the other end decides how often it tries
                self._warned, self._warned_at = str(error), now
                LOG.warning("a connection of %s was not used: %s", session.peer, error)
            self._turn_away(greeting, str(error), error.code, now, tell=not told, refusal=refusal)
            return
        ahead = isinstance(error, (Replaced, Stopping)) or (isinstance(error, Interrupted) and error.epoch > 0)
        tell = not told and not ahead  # a peer that is ahead waits for this worker to follow
        if tell and (greeting.said or self._say_hello(greeting, now)):
            self._use(greeting, now)
        session.fail(error, now, tell=tell)

    def _turn_away(self, greeting: Greeting, reason: str, code: Abort, now: float, *, tell: bool, refusal: bool = False) -> None:
        """Do without a connection and go on; the peer gets our HELLO as well, so that it can name the difference as seen from there."""
        if tell and (greeting.said or self._say_hello(greeting, now)):
            greeting.refuse(self._session.frame(Kind.ABORT, encode_abort(code, reason)), now)
        if greeting in self.greetings:
            remedy = "start it with the settings and the roster of the others"
            self._dismiss(greeting, Problem(reason, remedy, patience=False, refusal=refusal), now)

    def _use(self, greeting: Greeting, now: float) -> None:
        """Let the session use this connection from now on, and no other; older ones, and those that got our HELLO, know an older state."""
        session, place = self._session, self.greetings.index(greeting)
        self.greetings.remove(greeting)
        session.drop()
        if self._parked is not None:
            self._parked[0].close()
            self._parked = None
        for other in [other for number, other in enumerate(self.greetings) if other.said or number < place]:
            self._remove(other)
        greeting.check = session.check
        session.use(greeting.connection, greeting.parser, now)

    def _remove(self, greeting: Greeting) -> None:
        self.greetings.remove(greeting)
        greeting.connection.close()

    def _dismiss(self, greeting: Greeting, problem: Problem, now: float) -> None:
        """Give a connection up that is not in use; go on with the one that was put aside for it."""
        session = self._session
        self._remove(greeting)
        LOG.info("gave up a connection to %s: %s", session.peer, problem.text)
        if self._parked is not None and not self.greetings:
            (connection, parser), self._parked = self._parked, None
            session.use(connection, parser, now)
            session.state = "open"
        session.do_without(problem, now)

    def close(self) -> None:
        """Leave nothing behind."""
        for greeting in self.greetings:
            greeting.connection.close()
        if self._parked is not None:
            self._parked[0].close()
