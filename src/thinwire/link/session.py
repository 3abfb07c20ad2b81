"""The protocol of one link as a state machine: events and times come in, bytes go out. No thread, no socket, no clock.

    connecting -> hello -> open -> broken -> hello -> open ... -> closed | failed

`connecting` and `broken` wait for a stream (dialled here or handed over by a listener), `hello` for the peer's HELLO on it. A further
stream that comes while one is in use is judged by its HELLO first (`reception.py`): only the true peer takes the place of what works.
One thread drives it (`loop.py`): `tend` and `pump` whenever something may be due, `ready` for a stream that can go on. Others leave frames
in the outbox and take them from the inbox.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.link.connection import Connection
from thinwire.link.contract import Contract, Cursor
from thinwire.link.dial import Dialer
from thinwire.link.emulate import Wire
from thinwire.link.errors import Abort, Alert, LinkClosed, LinkError, ProtocolError, aborted, decode_abort, encode_abort
from thinwire.link.frame import HEADER_BYTES, UNSEQUENCED, Frame, Header, Kind, Parser
from thinwire.link.greeting import Greeting
from thinwire.link.heartbeat import TOKEN, Heartbeat, read_token
from thinwire.link.hello import Terms
from thinwire.link.inbox import Inbox, decode_ack
from thinwire.link.meter import LinkMeter
from thinwire.link.options import LINGER_SECONDS, LinkOptions
from thinwire.link.outbox import Outbox
from thinwire.link.peer import WorkerId
from thinwire.link.problem import NOT_CONNECTED, Problem, given_up
from thinwire.link.reception import Reception
from thinwire.link.transport import ByteStream
from thinwire.util.runtime import Runtime

LOG = logging.getLogger("thinwire.link")
SMALL_BATCH = 16 * 2**10
LARGE_BATCH = 256 * 2**10
QUICK_SECONDS = 0.002
"""A network that takes the rest of a batch within this time is not slow."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a link is between, what it may carry, and over what."""

    peer: WorkerId
    terms: Terms
    contract: Contract
    options: LinkOptions
    wire: Wire
    dialer: Dialer | None
    fingerprint: str
    """Of this worker's own certificate, which the peer's roster must hold."""
    newest: int | None
    """The newest incarnation of the peer that was met on an earlier link."""
    opened: Callable[[], None]
    """Told when the link opens."""
    failed: Callable[[LinkError], None]
    """Told why it failed."""


class Session:
    """State of one link."""

    def __init__(self, setup: Setup, runtime: Runtime) -> None:
        """Begin a link; the runtime is only for those who wait at its queues."""
        self.peer, self.terms, self.contract, self.options = setup.peer, setup.terms, setup.contract, setup.options
        self.wire, self.dialer, self.fingerprint = setup.wire, setup.dialer, setup.fingerprint
        self._opened, self._failed = setup.opened, setup.failed
        self.meter = LinkMeter()
        self.outbox = Outbox(Cursor(self.contract.outgoing, self.contract), self.options, self.meter, runtime)
        self.inbox = Inbox(Cursor(self.contract.incoming, self.contract), self.options, self.meter, runtime)
        self.error: LinkError | None = None
        self.congestion = "unknown"
        self.state = "connecting"
        self.connection: Connection | None = None
        """The one in use."""
        self.parser: Parser | None = None
        self.reception = Reception(self, setup.newest)
        self.stopped = False
        """Whether nothing is left to do."""
        self.telling = False
        """Whether the peer is still to hear why the link failed."""
        self._ending_at: float | None = None
        self._batch = SMALL_BATCH
        self._blocked_at: float | None = None
        """Since when the network has not taken all of a batch."""
        self._arrived = 0
        """Bytes that had come out at the other end when it was last asked for a sign of life, or last doubted."""
        self.heartbeat = Heartbeat(self.options)
        self.broken_since = runtime.now()
        self._problem = NOT_CONNECTED

    def tend(self, now: float) -> None:
        """Do what time demands."""
        unheard = self.reception.incarnation is None and self.outbox.only_goodbye
        if self.outbox.delivered or unheard or (self._ending_at is not None and now >= self._ending_at):
            self.stop()
        if self.stopped or self._ending_at is not None:
            if self.telling and self.connection is None and self.dialer is not None:
                self.dialer.tend(now, resolve=True)
            return
        self.reception.end_overdue(now)
        if self.state == "open":
            self._keep_alive(now)
        if self.state != "open" and now >= self.broken_since + self.options.reconnect_seconds:
            self.fail(given_up(self.peer, self.options.reconnect_seconds, self.problem), now, tell=False)
        elif self.dialer is not None and not self.reception.greetings:
            if self.connection is None or self._doubtful(now):
                self.dialer.tend(now, resolve=self.connection is None)
            elif self.dialer.stream is not None:
                self.dialer.cancel()  # the doubtful connection works after all

    def _keep_alive(self, now: float) -> None:
        """Give a silent connection up; ask for a sign of life when it is time."""
        assert self.connection is not None
        if self.heartbeat.silent(now):
            self._lose(Problem(f"silent for {self.options.silent_seconds} s"), now)
        elif (token := self.heartbeat.ping(now)) is not None:
            self._arrived, _ = self.connection.underway()
            self.outbox.put_urgent(self.frame(Kind.PING, TOKEN.pack(token)))

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

    def pump(self, now: float) -> None:
        """Move parts from the outbox through the stream and the wire to the network, as far as each takes them."""
        connection = self.connection
        if connection is None or self.stopped:
            return
        try:
            clear = connection.flush(now)
            if self._blocked_at is not None:
                self._note_speed(clear, now)
            while clear and (self.state == "open" or self.telling) and self.wire.accepts(now):
                if self.inbox.ack_due(now) and self.state == "open":
                    self.outbox.put_urgent(self.frame(Kind.ACK, self.inbox.acknowledgement()))
                batch = self.outbox.take(SMALL_BATCH if self.wire.limited else self._batch)
                if batch is None:
                    break
                connection.write(batch.pieces, now, batch.frames)
                clear = connection.flush(now)
                self._note_speed(clear, now)
        except OSError as error:
            self._lose(Problem(f"sending failed: {error.strerror or error}"), now)
            return
        self.meter.note_pace(not self.wire.accepts(now) and self.outbox.waiting, now)
        if self.telling and connection.idle and not self.outbox.waiting:
            connection.end_output()

    def _note_speed(self, clear: bool, now: float) -> None:
        """Give a network that takes all, or soon does, more at once; one that is slow, little: urgent frames find it nearly empty."""
        if not clear:
            self._blocked_at = now if self._blocked_at is None else self._blocked_at
            return
        quick = self._blocked_at is None or now - self._blocked_at <= QUICK_SECONDS
        self._batch, self._blocked_at = min(2 * self._batch, LARGE_BATCH) if quick else SMALL_BATCH, None

    def streams(self) -> dict[ByteStream, bool]:
        """Return the streams to wait for, and whether for room to send as well."""
        streams = {greeting.connection.stream: False for greeting in self.reception.greetings}
        if self.connection is not None:
            streams[self.connection.stream] = self.connection.blocked
        if self.dialer is not None and self.dialer.stream is not None:
            streams[self.dialer.stream] = False
        return streams

    def pause(self, now: float) -> float:
        """Return how long nothing can happen but what streams bring."""
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
        if self.dialer is not None and not self.reception.greetings and (self.connection is None or self.dialer.stream is not None):
            times.append(self.dialer.next_at)
        return max(0.0, min(times) - now)

    def ready(self, stream: ByteStream, now: float) -> None:
        """Go on with a stream on which something has happened."""
        if self.connection is not None and stream is self.connection.stream:
            self.take_in(None, now)
        elif self.dialer is not None and stream is self.dialer.stream:
            finished = self.dialer.go_on(now)
            if finished is not None:
                self.adopt(finished, now)
        else:
            for greeting in [greeting for greeting in self.reception.greetings if greeting.connection.stream is stream]:
                self.take_in(greeting, now)

    def adopt(self, stream: ByteStream, now: float) -> None:
        """Take over a stream whose peer has proven who it is."""
        if (self._ending_at is not None and not self.telling) or self.stopped:
            stream.end("close")
        else:
            self.reception.begin(Connection(stream), now)

    def use(self, connection: Connection, parser: Parser, now: float) -> None:
        """Use a connection from now on."""
        self.connection, self.parser = connection, parser
        connection.wire = self.wire
        self.congestion = connection.stream.congestion
        self._batch, self._blocked_at = SMALL_BATCH, None
        self.heartbeat.begin(now)

    def is_open(self) -> None:
        """Note that both ends have agreed on the connection."""
        self.state = "open"
        self.meter.connections += 1
        if self.dialer is not None:
            self.dialer.succeeded()
        self._opened()

    def frame(self, kind: Kind, payload: bytes) -> Frame:
        return Frame.make(kind, payload, epoch=self.contract.epoch)

    def take_in(self, greeting: Greeting | None, now: float) -> None:
        """Handle what has come on the connection in use, or on one with which a greeting is under way."""
        source, parser = (self.connection, self.parser) if greeting is None else (greeting.connection, greeting.parser)
        assert source is not None and parser is not None
        try:
            before = self.meter.received.socket
            records = source.read()
            if greeting is None and (records or self.meter.received.socket > before):  # on a slow line a record takes long to be whole
                self.heartbeat.heard(now)
            for record in records:
                if self.telling or self.stopped:
                    return  # after a refusal only the end of the stream matters
                for frame in parser.feed(record):
                    if source is self.connection:
                        self._handle(frame, now)
                    elif greeting is not None:
                        self.reception.take(greeting, frame, now)
                    if self.telling or self.stopped or not (source is self.connection or greeting in self.reception.greetings):
                        return
        except OSError as error:
            if greeting is not None and source is not self.connection:
                self.reception.failed(greeting, error, now)
            elif isinstance(error, ProtocolError):
                self.fail(error, now, tell=True)
            else:
                self._lose(Problem(f"TLS: {error}" if isinstance(error, Alert) else str(error.strerror or error)), now)
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

    def _handle(self, frame: Frame, now: float) -> None:
        """Act on one part."""
        header = frame.header
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
            self.fail(aborted(f"{self.peer} aborted the link", *decode_abort(frame.payload)), now, tell=False)

    def _said_goodbye(self, now: float) -> None:
        """Acknowledge the peer's goodbye and wait for it to hang up."""
        error = LinkClosed(f"{self.peer} has closed the link")
        self.inbox.end(error)
        self.outbox.fail(error)
        self.outbox.put_urgent(self.frame(Kind.ACK, self.inbox.acknowledgement()))
        self._ending_at = now + LINGER_SECONDS

    def _lose(self, problem: Problem, now: float) -> None:
        """Go on without the connection; the link stays."""
        self.drop()
        if self._ending_at is not None:
            self.stopped = not (self.telling and self.outbox.waiting)
            return
        LOG.info("lost the connection to %s: %s", self.peer, problem.text)
        self.do_without(problem, now)

    def do_without(self, problem: Problem, now: float) -> None:
        """Note that a connection was given up, and why; another may be in use."""
        if self.connection is None:
            if self.state == "open":
                self.broken_since = now
            self._problem = problem
            self.state = "failed" if self.error else "hello" if self.reception.greetings else "broken"
            self.reception.lost(now)
        if self.dialer is not None and self.dialer.stream is None:
            self.dialer.back_off(now, problem)

    def reset(self, now: float) -> None:
        """Break the connection, as a fault would."""
        if self.connection is not None:
            self.connection.reset()
            self._lose(Problem("reset by a test"), now)

    def abort(self, reason: str, code: Abort, now: float) -> None:
        """Fail on purpose."""
        self.fail(aborted("aborted on this end", code, reason), now, tell=True)

    def fail(self, error: LinkError, now: float, *, tell: bool) -> None:
        """End the link with an error, now for the callers here, and for the peer if it can be told."""
        if self.error is not None or self._ending_at is not None:
            return
        self.error = error
        self.state = "failed"
        LOG.info("the link to %s failed: %s", self.peer, error)
        self.outbox.fail(error)
        self.inbox.fail(error)
        self._opened()
        self._failed(error)
        if not tell:
            self.stop()
            return
        self.outbox.put_urgent(self.frame(Kind.ABORT, encode_abort(error.code, error.reason)))
        self.telling = True
        self.reception.tell(now)
        self._ending_at = now + self.options.abort_seconds + self.wire.delay + self.wire.jitter

    def stop(self) -> None:
        """End without another word."""
        self.stopped = True

    def drop(self) -> None:
        """Let go of the connection in use."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def dispose(self) -> None:
        """Leave nothing behind."""
        self.stopped = True
        self.drop()
        self.reception.close()
        if self.dialer is not None:
            self.dialer.cancel()
        closed = self.error or LinkClosed("the link is closed on this end")
        self.outbox.fail(closed)
        self.inbox.end(closed)
        if self.state != "failed":
            self.state = "closed"
        self._opened()
