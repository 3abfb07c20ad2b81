"""The I/O thread of one link: it alone touches the connection.

    connecting -> hello -> open -> broken -> hello -> open ... -> closed | failed

`connecting` and `broken` wait for a connection (dialled here or handed over by a listener), `hello` for the peer's HELLO on it. A further
connection that comes while one is in use is judged by its HELLO first (`reception.py`): only the true peer takes the place of what works.
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
from thinwire.link.errors import Abort, LinkClosed, LinkError, ProtocolError, aborted, decode_abort, encode_abort
from thinwire.link.frame import HEADER_BYTES, UNSEQUENCED, Frame, Header, Kind, Parser
from thinwire.link.greeting import Greeting
from thinwire.link.heartbeat import TOKEN, Heartbeat, read_token
from thinwire.link.hello import Terms
from thinwire.link.inbox import Inbox, decode_ack
from thinwire.link.meter import Meter
from thinwire.link.options import LINGER_SECONDS, LinkOptions
from thinwire.link.outbox import Outbox
from thinwire.link.peer import WorkerId
from thinwire.link.problem import NOT_CONNECTED, Problem, given_up
from thinwire.link.reception import Reception

LOG = logging.getLogger("thinwire.link")
SMALL_BATCH = 16 * 2**10
LARGE_BATCH = 256 * 2**10


class Loop:
    """State of one link and the thread that changes it."""

    def __init__(
        self,
        peer: WorkerId,
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
        self.connection: Connection | None = None
        """The one in use."""
        self.parser: Parser | None = None
        self.reception = Reception(self, newest)
        self._stopped = False
        self.telling = False
        self._ending_at: float | None = None
        self._batch = SMALL_BATCH
        self._arrived = 0
        """Bytes that had come out at the other end when it was last asked for a sign of life, or last doubted."""
        now = time.monotonic()
        self.heartbeat = Heartbeat(options)
        self.broken_since = now
        self._problem = NOT_CONNECTED
        self._bell = Doorbell()
        self.wake = self._bell.ring
        self.call = self._bell.call
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._bell.socket, selectors.EVENT_READ, self._bell.answer)
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
                    for key, _ in self.selector.select(self._pause(time.monotonic())):
                        key.data()
        except Exception as error:  # a defect here must reach the callers instead of ending the thread in silence
            LOG.exception("the I/O thread of the link to %s failed", self.peer)
            self.fail(LinkError(f"internal error in the link to {self.peer}: {error!r}"), tell=False)
        finally:
            self._dispose()

    def _tend(self, now: float) -> None:
        """Do what time demands."""
        unheard = self.reception.incarnation is None and self.outbox.only_goodbye
        if self.outbox.delivered or unheard or (self._ending_at is not None and now >= self._ending_at):
            self.stop()
        if self._stopped or self._ending_at is not None:
            if self.telling and self.connection is None and self.dialer is not None:
                self.dialer.tend(now, self.selector, self._dialled, resolve=True)
            return
        self.reception.end_overdue(now)
        if self.state == "open":
            assert self.connection is not None
            if self.heartbeat.silent(now):
                self._lose(Problem(f"silent for {self.options.silent_seconds} s"))
            elif (token := self.heartbeat.ping(now)) is not None:
                self._arrived, _ = self.connection.underway()
                self.outbox.put_urgent(self.frame(Kind.PING, TOKEN.pack(token)))
        if self.state != "open" and now >= self.broken_since + self.options.reconnect_seconds:
            self.fail(given_up(self.peer, self.options.reconnect_seconds, self.problem), tell=False)
        elif self.dialer is not None and not self.reception.greetings:
            if self.connection is None or self._doubtful(now):
                self.dialer.tend(now, self.selector, self._dialled, resolve=self.connection is None)
            elif self.dialer.busy:
                self.dialer.cancel(self.selector)  # the doubtful connection works after all

    @property
    def problem(self) -> Problem:
        """Return why there is no connection, or was none."""
        return self._problem if self.dialer is None else self.dialer.problem

    def _doubtful(self, now: float) -> bool:
        """Tell whether an answer is overdue, and the question is not merely waiting for what was sent before it on a slow line."""
        assert self.connection is not None
        if not self.heartbeat.doubtful(now):
            return False
        before, (self._arrived, more) = self._arrived, self.connection.underway()
        moving = more and self._arrived > before
        if moving:
            self.heartbeat.moved(now)
        return not moving

    def _pump(self, now: float) -> None:
        """Move parts from the outbox through TLS and the wire to the socket, as far as each takes them."""
        connection = self.connection
        if connection is None or self._stopped:
            return
        try:
            clear = connection.flush(now)
            while clear and (self.state == "open" or self.telling) and self.wire.accepts(now):
                if self.inbox.ack_due(now) and self.state == "open":
                    self.outbox.put_urgent(self.frame(Kind.ACK, self.inbox.acknowledgement()))
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
        if self.telling and connection.idle and not self.outbox.waiting:
            connection.end_output()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.blocked else 0)
        if self.selector.get_key(connection.socket).events != events:
            self.selector.modify(connection.socket, events, self._readable)

    def _pause(self, now: float) -> float:
        """Return how long nothing can happen but socket events."""
        times = [now + 3600.0]
        if self._ending_at is not None:
            times.append(self._ending_at)
        elif self.state != "open":
            times.append(self.broken_since + self.options.reconnect_seconds)
        if self._ending_at is None:
            times += [greeting.deadline for greeting in self.reception.greetings]
        if self.connection is not None:
            if self._ending_at is None:
                times.append(self.heartbeat.next_at(now))
            if self.wire.next_at is not None:
                times.append(self.wire.next_at)
            if self.state == "open" and not self.connection.blocked:
                # whatever is due waits for the wire; asking again before that would only burn the processor
                work_at = now if self.outbox.waiting or self.inbox.report_due else self.inbox.ack_at
                if work_at is not None:
                    times.append(max(work_at, self.wire.accepts_at()))
        if self.dialer is not None and not self.reception.greetings and (self.connection is None or self.dialer.busy):
            times.append(self.dialer.next_at)
        return max(0.0, min(times) - now)

    def _dialled(self) -> None:
        """Go on with an outgoing attempt."""
        assert self.dialer is not None
        if not self.dialer.busy:
            return
        connection = self.dialer.progress(time.monotonic(), self.selector, self._dialled)
        if connection is not None:
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        if (self._ending_at is not None and not self.telling) or self._stopped:
            connection.close()
        else:
            self.reception.begin(connection)

    def use(self, connection: Connection, parser: Parser, now: float) -> None:
        """Use a connection that is registered, from now on."""
        self.connection, self.parser = connection, parser
        connection.wire = self.wire
        self.congestion = connection.congestion
        self._batch = SMALL_BATCH
        self.heartbeat.begin(now)
        self.selector.modify(connection.socket, selectors.EVENT_READ, self._readable)

    def is_open(self) -> None:
        """Note that both ends have agreed on the connection."""
        self.state = "open"
        self.meter.connections += 1
        if self.dialer is not None:
            self.dialer.succeeded()
        self.opened.set()

    def frame(self, kind: Kind, payload: bytes) -> Frame:
        return Frame.make(kind, payload, epoch=self.contract.epoch)

    def _readable(self) -> None:
        if self.connection is not None:
            self.take_in(None, self.connection.read)

    def take_in(self, greeting: Greeting | None, read: Callable[[], list[bytes]]) -> None:
        """Handle what a read of the connection in use gives, or of one with which a greeting is under way."""
        source = self.connection if greeting is None else greeting.connection
        if greeting is not None and source is not self.connection and greeting not in self.reception.greetings:
            return  # given up in the same moment
        parser = self.parser if greeting is None else greeting.parser
        assert parser is not None
        try:
            before = self.meter.received.socket
            records = read()
            if greeting is None and (records or self.meter.received.socket > before):  # on a slow line a record takes long to be whole
                self.heartbeat.heard(time.monotonic())
            for record in records:
                if self.telling or self._stopped:
                    return  # after a refusal only the end of the stream matters
                for frame in parser.feed(record):
                    if source is self.connection:
                        self._handle(frame)
                    elif greeting is not None:
                        self.reception.take(greeting, frame)
                    if self.telling or self._stopped or not (source is self.connection or greeting in self.reception.greetings):
                        return
        except OSError as error:
            if greeting is not None and source is not self.connection:
                self.reception.failed(greeting, error)
            elif isinstance(error, ProtocolError):
                self.fail(error, tell=True)
            else:
                self._lose(Problem(f"TLS: {error.reason or error}" if isinstance(error, ssl.SSLError) else str(error.strerror or error)))
        finally:
            self.inbox.announce()

    def check(self, header: Header) -> None:
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
            self.outbox.put_urgent(self.frame(Kind.PONG, bytes(frame.payload[: TOKEN.size])))
        elif header.kind is Kind.PONG:
            self.heartbeat.pong(read_token(frame.payload), now)
        else:
            self.fail(aborted(f"{self.peer} aborted the link", *decode_abort(frame.payload)), tell=False)

    def _said_goodbye(self, now: float) -> None:
        """Acknowledge the peer's goodbye and wait for it to hang up."""
        error = LinkClosed(f"{self.peer} has closed the link")
        self.inbox.end(error)
        self.outbox.fail(error)
        self.outbox.put_urgent(self.frame(Kind.ACK, self.inbox.acknowledgement()))
        self._ending_at = now + LINGER_SECONDS

    def _lose(self, problem: Problem) -> None:
        """Go on without the connection; the link stays."""
        self.drop()
        if self._ending_at is not None:
            self._stopped = not (self.telling and self.outbox.waiting)
            return
        LOG.info("lost the connection to %s: %s", self.peer, problem.text)
        self.do_without(problem)

    def do_without(self, problem: Problem) -> None:
        """Note that a connection was given up, and why; another may be in use."""
        now = time.monotonic()
        if self.connection is None:
            if self.state == "open":
                self.broken_since = now
            self._problem = problem
            self.state = "failed" if self.error else "hello" if self.reception.greetings else "broken"
            self.reception.lost(now)
        if self.dialer is not None and not self.dialer.busy:
            self.dialer.back_off(now, problem)

    def reset(self) -> None:
        """Break the TCP connection, as a fault would (call it through `call`)."""
        if self.connection is not None:
            self.connection.reset()
            self._lose(Problem("reset by a test"))

    def abort(self, reason: str, code: Abort) -> None:
        """Fail on purpose (call it through `call`)."""
        self.fail(aborted("aborted on this end", code, reason), tell=True)

    def fail(self, error: LinkError, *, tell: bool) -> None:
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
        self.outbox.put_urgent(self.frame(Kind.ABORT, encode_abort(error.code, error.reason)))
        self.telling = True
        self.reception.tell()
        self._ending_at = time.monotonic() + self.options.abort_seconds + self.wire.delay + self.wire.jitter

    def stop(self) -> None:
        """End the thread without another word (call it through `call`)."""
        self._stopped = True

    def drop(self) -> None:
        if self.connection is not None:
            self.selector.unregister(self.connection.socket)
            self.connection.close()
            self.connection = None

    def _dispose(self) -> None:
        """Leave nothing behind."""
        self._stopped = True
        self._bell.close()  # obeys the last commands: a connection handed over too late closes itself
        self.drop()
        self.reception.close()
        if self.dialer is not None:
            self.dialer.cancel(self.selector)
        self.selector.close()
        closed = self.error or LinkClosed("the link is closed on this end")
        self.outbox.fail(closed)
        self.inbox.end(closed)
        if self.state != "failed":
            self.state = "closed"
        self.opened.set()
        self._finished()
