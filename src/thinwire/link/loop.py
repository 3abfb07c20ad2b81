"""The I/O thread of one link: it alone touches the connection.

    connecting -> hello -> open -> broken -> hello -> open ... -> closed | failed

`connecting` and `broken` wait for a connection (dialled here or handed over by a listener), `hello` for the peer's HELLO on it. A further
connection that comes while one is in use is judged by its HELLO first (`greeting.py`): only the true peer takes the place of what works.
Every change of state happens in this thread; other threads leave frames in the outbox, take them from the inbox, or `call` something.
"""

from __future__ import annotations

import logging
import selectors
import ssl
import threading
import time
from collections.abc import Callable

from thinwire.link.connection import Connection
from thinwire.link.contract import Contract, Cursor
from thinwire.link.dial import Dialer
from thinwire.link.doorbell import Doorbell
from thinwire.link.emulate import Wire
from thinwire.link.errors import Interrupted, LinkClosed, LinkError, ProtocolError, Replaced, aborted, refused
from thinwire.link.frame import HEADER_BYTES, UNSEQUENCED, Frame, Header, Kind, Parser
from thinwire.link.greeting import Greeting
from thinwire.link.heartbeat import TOKEN, Heartbeat, read_token
from thinwire.link.hello import Hello, PeerBehind, PeerReplaced, Terms, decode_hello, judge, make_hello
from thinwire.link.inbox import Inbox, decode_ack
from thinwire.link.meter import Meter
from thinwire.link.options import LINGER_SECONDS, MAX_REASON_BYTES, LinkOptions
from thinwire.link.outbox import Outbox
from thinwire.link.problem import NOT_CONNECTED, Problem, given_up
from thinwire.link.roster import Place

LOG = logging.getLogger("thinwire.link")
SMALL_BATCH = 16 * 2**10
LARGE_BATCH = 256 * 2**10
MOST_GREETINGS = 4
"""Connections that may wait for the peer's HELLO; all of them have its certificate."""


class Loop:
    """State of one link and the thread that changes it."""

    def __init__(
        self,
        peer: Place,
        terms: Terms,
        contract: Contract,
        options: LinkOptions,
        wire: Wire,
        dialer: Dialer | None,
        finished: Callable[[], None],
        failed: Callable[[LinkError], None],
        newest: int | None,
    ) -> None:
        self.peer, self.terms, self.contract, self.options, self.wire = peer, terms, contract, options, wire
        self.meter = Meter()
        self.outbox = Outbox(Cursor(contract.outgoing, contract), options, self.meter)
        self.inbox = Inbox(Cursor(contract.incoming, contract), options, self.meter)
        self.dialer = dialer
        self.opened = threading.Event()
        """Set once the link has opened, or has failed to."""
        self.error: LinkError | None = None
        self.congestion = "unknown"
        self.state = "connecting"
        self._finished = finished
        self._failed = failed
        self.newest = newest
        """The newest incarnation of the peer that was ever met, on an earlier link too."""
        self._connection: Connection | None = None
        """The one in use."""
        self._parser: Parser | None = None
        self._greetings: list[Greeting] = []
        """Connections on which the peer's HELLO has not come yet, the oldest first."""
        self._parked: tuple[Connection, Parser] | None = None
        """The one that was in use, while one that was dialled because of doubts says HELLO."""
        self._incarnation: int | None = None
        self._stopped = False
        self._telling = False
        self._ending_at: float | None = None
        self._batch = SMALL_BATCH
        self._arrived = 0
        """Bytes that had come out at the other end when it was last asked for a sign of life, or last doubted."""
        now = time.monotonic()
        self.heartbeat = Heartbeat(options)
        self.broken_since = now
        self._problem = NOT_CONNECTED if dialer is None else None
        self._bell = Doorbell()
        self.wake = self._bell.ring
        self.call = self._bell.call
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell.socket, selectors.EVENT_READ, self._bell.answer)
        self.thread = threading.Thread(target=self._run, name=f"thinwire-link to {peer}", daemon=True)

    def adopt(self, connection: Connection) -> None:
        """Take over a connection from a listener."""
        if not self.call(lambda: self._begin(connection)):
            connection.close()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._bell.obey()
                now = time.monotonic()
                self._tend(now)
                self._pump(now)
                if not self._stopped:
                    for key, _ in self._selector.select(self._pause(time.monotonic())):
                        key.data()
        except Exception as error:  # a defect here must reach the callers instead of ending the thread in silence
            LOG.exception("the I/O thread of the link to %s failed", self.peer)
            self._fail(LinkError(f"internal error in the link to {self.peer}: {error!r}"), tell=False)
        finally:
            self._dispose()

    def _tend(self, now: float) -> None:
        """Do what time demands."""
        unheard = self._incarnation is None and self.outbox.only_goodbye
        if self.outbox.delivered or unheard or (self._ending_at is not None and now >= self._ending_at):
            self.stop()
        if self._stopped or self._ending_at is not None:
            if self._telling and self._connection is None and self.dialer is not None:
                self.dialer.tend(now, self._selector, self._dialled, resolve=True)
            return
        for greeting in [greeting for greeting in self._greetings if now >= greeting.deadline]:
            self._dismiss(greeting, Problem(f"no HELLO within {self.options.establish_seconds} s"))
        if self.state == "open":
            assert self._connection is not None
            if self.heartbeat.silent(now):
                self._lose(Problem(f"silent for {self.options.silent_seconds} s"))
            elif (token := self.heartbeat.ping(now)) is not None:
                self._arrived, _ = self._connection.underway()
                self.outbox.put_urgent(self._frame(Kind.PING, TOKEN.pack(token)))
        if self.state != "open" and now >= self.broken_since + self.options.reconnect_seconds:
            problem = self._problem or (self.dialer.problem if self.dialer else NOT_CONNECTED)
            self._fail(given_up(self.peer, self.options.reconnect_seconds, problem), tell=False)
        elif self.dialer is not None and not self._greetings:
            if self._connection is None or self._doubtful(now):
                self.dialer.tend(now, self._selector, self._dialled, resolve=self._connection is None)
            elif self.dialer.busy:
                self.dialer.cancel(self._selector)  # the doubtful connection works after all

    def _doubtful(self, now: float) -> bool:
        """Tell whether an answer is overdue, and the question is not merely waiting for what was sent before it on a slow line."""
        assert self._connection is not None
        if not self.heartbeat.doubtful(now):
            return False
        before, (self._arrived, more) = self._arrived, self._connection.underway()
        moving = more and self._arrived > before
        if moving:
            self.heartbeat.moved(now)
        return not moving

    def _pump(self, now: float) -> None:
        """Move parts from the outbox through TLS and the wire to the socket, as far as each takes them."""
        connection = self._connection
        if connection is None or self._stopped:
            return
        try:
            clear = connection.flush(now)
            while clear and (self.state == "open" or self._telling) and self.wire.accepts(now):
                if self.inbox.ack_due(now) and self.state == "open":
                    self.outbox.put_urgent(self._frame(Kind.ACK, self.inbox.acknowledgement()))
                batch = self.outbox.take(SMALL_BATCH if self.wire.limited else self._batch)
                if batch is None:
                    break
                connection.write(batch.pieces, now, batch.frames)
                clear = connection.flush(now)
                # a socket that takes all gets more at once; one that is slow, little, so that urgent frames find it nearly empty
                self._batch = min(2 * self._batch, LARGE_BATCH) if clear else SMALL_BATCH
        except OSError as error:
            self._lose(Problem(f"sending failed: {error.strerror or error}"))
            return
        self.meter.note_pace(not self.wire.accepts(now) and self.outbox.waiting, now)
        if self._telling and connection.idle and not self.outbox.waiting:
            connection.end_output()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.blocked else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, self._readable)

    def _pause(self, now: float) -> float:
        """Return how long nothing can happen but socket events."""
        times = [now + 3600.0]
        if self._ending_at is not None:
            times.append(self._ending_at)
        elif self.state != "open":
            times.append(self.broken_since + self.options.reconnect_seconds)
        times += [greeting.deadline for greeting in self._greetings]
        if self._connection is not None:
            if self._ending_at is None:
                times.append(self.heartbeat.next_at(now))
            if self.wire.next_at is not None:
                times.append(self.wire.next_at)
            if self.state == "open" and not self._connection.blocked:
                # whatever is due waits for the wire; asking again before that would only burn the processor
                work_at = now if self.outbox.waiting or self.inbox.report_due else self.inbox.ack_at
                if work_at is not None:
                    times.append(max(work_at, self.wire.accepts_at()))
        if self.dialer is not None and (self._connection is None or self.dialer.busy):
            times.append(self.dialer.next_at)
        return max(0.0, min(times) - now)

    def _dialled(self) -> None:
        """Go on with an outgoing attempt."""
        assert self.dialer is not None
        if not self.dialer.busy:
            return
        connection = self.dialer.progress(time.monotonic(), self._selector, self._dialled)
        if connection is not None:
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        """Greet the peer on a new connection; what is in use stays so until the peer's HELLO is judged."""
        if (self._ending_at is not None and not self._telling) or self._stopped:
            connection.close()
            return
        now = time.monotonic()
        if self.dialer is not None and self._connection is not None and not self._telling:
            self._park(now)
        greeting = Greeting(connection, self.contract, now + self.options.establish_seconds)
        self.meter.absorb(connection.meter)
        connection.meter = self.meter
        self._greetings.append(greeting)
        self._selector.register(connection.socket, selectors.EVENT_READ, lambda: self._take_in(greeting, connection.read))
        if len(self._greetings) > MOST_GREETINGS:
            self._dismiss(self._greetings[0], Problem(f"no HELLO before {MOST_GREETINGS} other connections came"))
        if self._connection is None:
            if not self._telling:
                self.state = "hello"
            if not self._say_hello(greeting, now):
                return
            if self._telling:
                self._use(greeting, now)
                return
        self._take_in(greeting, connection.records)  # HELLO may have come with the handshake

    def _park(self, now: float) -> None:
        """Put the doubtful connection aside: what came in on it from here on would not be in our HELLO on the next one."""
        assert self._connection is not None and self._parser is not None
        self._selector.unregister(self._connection.socket)
        self._parked = (self._connection, self._parser)
        self._connection = None
        self.broken_since = now

    def _say_hello(self, greeting: Greeting, now: float) -> bool:
        """Send our HELLO; return whether that was possible."""
        try:
            greeting.say(self._frame(Kind.HELLO, self._hello().encode()), now)
        except OSError as error:
            self._dismiss(greeting, Problem(f"sending HELLO failed: {error.strerror or error}"))
            return False
        return True

    def _use(self, greeting: Greeting, now: float) -> None:
        """Use the connection of a greeting from now on, and no other; those that got our HELLO before know an older state."""
        self._greetings.remove(greeting)
        self._drop()
        if self._parked is not None:
            self._parked[0].close()
            self._parked = None
        for other in [other for other in self._greetings if other.said]:
            self._dismiss(other, Problem("another connection was faster"))
        self._connection, self._parser = greeting.connection, greeting.parser
        greeting.check = self._check
        self._connection.wire = self.wire
        self.congestion = self._connection.congestion
        self._batch = SMALL_BATCH
        self.heartbeat.begin(now)
        self._selector.modify(self._connection.socket, selectors.EVENT_READ, self._readable)

    def _dismiss(self, greeting: Greeting, problem: Problem) -> None:
        """Give a connection up that is not in use; go on with the one before it, if there is one."""
        self._greetings.remove(greeting)
        self._selector.unregister(greeting.connection.socket)
        greeting.connection.close()
        LOG.info("gave up a connection to %s: %s", self.peer, problem.text)
        if self._parked is not None and not self._greetings:
            (self._connection, self._parser), self._parked = self._parked, None
            self._selector.register(self._connection.socket, selectors.EVENT_READ, self._readable)
            self.heartbeat.begin(time.monotonic())
            self.state = "open"
        if self._connection is None:
            self._without(problem)
        elif self.dialer is not None:
            self.dialer.back_off(time.monotonic())

    def _hello(self) -> Hello:
        return make_hello(self.terms, self.contract.epoch, self.options, self.inbox.received, self.inbox.consumed(), self.newest or 0)

    def _frame(self, kind: Kind, payload: bytes) -> Frame:
        return Frame.make(kind, payload, epoch=self.contract.epoch)

    def _readable(self) -> None:
        if self._connection is not None:
            self._take_in(None, self._connection.read)

    def _take_in(self, greeting: Greeting | None, read: Callable[[], list[bytes]]) -> None:
        """Handle what a read of the connection in use gives, or of one with which a greeting is under way."""
        source = self._connection if greeting is None else greeting.connection
        parser = self._parser if greeting is None else greeting.parser
        assert parser is not None
        try:
            before = self.meter.received.socket
            records = read()
            if greeting is None and (records or self.meter.received.socket > before):  # on a slow line a record takes long to be whole
                self.heartbeat.heard(time.monotonic())
            for record in records:
                for frame in parser.feed(record):
                    if source is self._connection:
                        self._handle(frame)
                    elif greeting is not None:
                        self._greet(greeting, frame, time.monotonic())
                    # after a refusal only the end of the stream matters
                    if self._telling or self._stopped or not (source is self._connection or greeting in self._greetings):
                        return
        except OSError as error:
            self._failed_read(None if source is self._connection else greeting, error)
        finally:
            self.inbox.announce()

    def _failed_read(self, greeting: Greeting | None, error: OSError) -> None:
        """Act on a frame that is refused, or on a connection that is lost."""
        text = f"TLS: {error.reason or error}" if isinstance(error, ssl.SSLError) else str(error.strerror or error)
        if greeting is None:
            if isinstance(error, ProtocolError):
                self._fail(error, tell=True)
            else:
                self._lose(Problem(text))
        elif isinstance(error, LinkError):
            self._turn_away(greeting, error)
        elif isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            # the peer has finished its handshake only when it answers: its refusal of our certificate arrives here
            refusal = refused(self.peer, error, self.dialer.fingerprint if self.dialer else "")
            if self.newest is None:
                self._fail(refusal, tell=False)
            else:
                self._dismiss(greeting, Problem(str(refusal)))
        else:
            self._dismiss(greeting, Problem(text))

    def _check(self, header: Header) -> None:
        """Refuse a header that the contract does not allow on an open link."""
        if header.kind in UNSEQUENCED:
            self.contract.check_unsequenced(header)
            if header.kind is Kind.HELLO:
                raise ProtocolError("kind", header.kind.name, "HELLO first, and once")
        else:
            self.inbox.check(header)

    def _handle(self, frame: Frame) -> None:
        """Act on one part."""
        header, now = frame.header, time.monotonic()
        self.meter.received.framed[header.channel] += HEADER_BYTES + header.length
        if header.kind not in UNSEQUENCED:
            if self.inbox.accept(frame, now) and header.kind is Kind.BYE:
                self._said_goodbye(now)
        elif header.kind is Kind.ACK:
            self.outbox.acknowledge(*decode_ack(frame.payload))
        elif header.kind is Kind.PING:
            self.outbox.put_urgent(self._frame(Kind.PONG, bytes(frame.payload[: TOKEN.size])))
        elif header.kind is Kind.PONG:
            self.heartbeat.pong(read_token(frame.payload), now)
        else:
            self._fail(self._abort_in(frame), tell=False)

    def _abort_in(self, frame: Frame) -> LinkError:
        return aborted(f"{self.peer} aborted the link", bytes(frame.payload).decode(errors="replace"))

    def _greet(self, greeting: Greeting, frame: Frame, now: float) -> None:
        """Compare the peer's HELLO with ours and open, or say what differs."""
        if frame.header.kind is Kind.ABORT:
            self._turn_away(greeting, self._abort_in(frame), told=True)
            return
        theirs = decode_hello(frame.payload)
        try:
            judge(self._hello(), theirs, self.peer, self.newest, heard=self._incarnation is not None)
            self.outbox.rewind(theirs.received, theirs.consumed)
        except PeerBehind as error:
            self._dismiss(greeting, Problem(str(error)))
        except PeerReplaced as error:
            self._turn_away(greeting, LinkError(str(error)), stale=True)
        else:
            if not greeting.said:
                self._drop()  # from here on nothing comes in that our HELLO would not count
                if not self._say_hello(greeting, now):
                    return
            self._use(greeting, now)
            self._incarnation = self.newest = theirs.incarnation
            self._problem = None
            self.state = "open"
            self.meter.connections += 1
            if self.dialer is not None:
                self.dialer.succeeded()
            self.opened.set()

    def _turn_away(self, greeting: Greeting, error: LinkError, *, told: bool = False, stale: bool = False) -> None:
        """Refuse a greeting, or be refused by it (`told`).

        It is the end of a link that never was. A peer that was met before is waited for instead, or goes on, if it is still there:
        this may be a second process of it with other settings. Only one that was restarted, or has moved on, ends the epoch.
        """
        now = time.monotonic()
        if stale or (self.newest is not None and (type(error) is LinkError or isinstance(error, ProtocolError))):
            if not told and (greeting.said or self._say_hello(greeting, now)):  # our HELLO too: there the difference is named as seen there
                greeting.refuse(self._frame(Kind.ABORT, str(error).encode()[:MAX_REASON_BYTES]), now)
            if greeting in self._greetings:
                LOG.log(logging.INFO if stale else logging.WARNING, "%s was turned away: %s", self.peer, error)
                self._dismiss(greeting, Problem(str(error), "start it as the others were started", patience=False))
            return
        tell = not told and not isinstance(error, Replaced) and not (isinstance(error, Interrupted) and error.epoch)
        if tell and (greeting.said or self._say_hello(greeting, now)):
            self._use(greeting, now)
        self._fail(error, tell=tell)

    def _said_goodbye(self, now: float) -> None:
        """Acknowledge the peer's goodbye and wait for it to hang up."""
        error = LinkClosed(f"{self.peer} has closed the link")
        self.inbox.end(error)
        self.outbox.fail(error)
        self.outbox.put_urgent(self._frame(Kind.ACK, self.inbox.acknowledgement()))
        self._ending_at = now + LINGER_SECONDS

    def _lose(self, problem: Problem) -> None:
        """Go on without the connection; the link stays."""
        now = time.monotonic()
        self._drop()
        if self._ending_at is not None:
            self._stopped = not (self._telling and self.outbox.waiting)
            return
        LOG.info("lost the connection to %s: %s", self.peer, problem.text)
        if self.state == "open":
            self.broken_since = now
        self._without(problem)

    def _without(self, problem: Problem) -> None:
        """Note that no connection is in use, and why."""
        now = time.monotonic()
        if self.state == "open":
            self.broken_since = now
        self._problem = problem
        if self._greetings:
            self.state = "hello"
            for greeting in [greeting for greeting in self._greetings if not greeting.said]:
                self._say_hello(greeting, now)
        elif self.error is None:
            self.state = "broken"
        if self.dialer is not None and not self.dialer.busy:
            self.dialer.back_off(now)

    def reset(self) -> None:
        """Break the TCP connection, as a fault would (call it through `call`)."""
        if self._connection is not None:
            self._connection.reset()
            self._lose(Problem("reset by a test"))

    def abort(self, reason: str) -> None:
        """Fail on purpose (call it through `call`)."""
        self._fail(aborted("aborted on this end", reason), tell=True, reason=reason)

    def _fail(self, error: LinkError, *, tell: bool, reason: str | None = None) -> None:
        """End the link with an error, now for the callers here, and for the peer if it can be told."""
        if self.error is not None or self._ending_at is not None:
            return
        self.error = error
        self.state = "failed"
        LOG.info("the link to %s failed: %s", self.peer, error)
        self.outbox.fail(error)
        self.inbox.fail(error)
        self.opened.set()
        self._failed(error)
        if not tell:
            self.stop()
            return
        text = (str(error) if reason is None else reason).encode()[:MAX_REASON_BYTES]
        self.outbox.put_urgent(self._frame(Kind.ABORT, text))
        self._telling = True
        self._ending_at = time.monotonic() + self.options.abort_seconds + self.wire.delay + self.wire.jitter

    def stop(self) -> None:
        """End the thread without another word (call it through `call`)."""
        self._stopped = True

    def _drop(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection.socket)
            self._connection.close()
            self._connection = None

    def _dispose(self) -> None:
        """Leave nothing behind."""
        self._stopped = True
        self._bell.close()  # obeys the last commands: a connection handed over too late closes itself
        self._drop()
        for greeting in self._greetings:
            greeting.connection.close()
        if self._parked is not None:
            self._parked[0].close()
        if self.dialer is not None:
            self.dialer.cancel(self._selector)
        self._selector.close()
        closed = self.error or LinkClosed("the link is closed on this end")
        self.outbox.fail(closed)
        self.inbox.end(closed)
        if self.state != "failed":
            self.state = "closed"
        self.opened.set()
        self._finished()
