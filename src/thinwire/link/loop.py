"""The I/O thread of one link: it alone touches the connection.

    connecting -> hello -> open -> broken -> hello -> open ... -> closed | failed

`connecting` and `broken` wait for a connection (dialled here or handed over by a listener), `hello` for the peer's HELLO on it. Every
change of state happens in this thread; other threads leave frames in the outbox, take them from the inbox, or `call` something.
"""

from __future__ import annotations

import logging
import selectors
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from thinwire.link.connection import Connection
from thinwire.link.contract import Contract, Cursor
from thinwire.link.dial import Dialer
from thinwire.link.doorbell import Doorbell
from thinwire.link.emulate import Wire
from thinwire.link.errors import Interrupted, LinkClosed, LinkError, ProtocolError, Replaced, aborted, refused
from thinwire.link.frame import HEADER_BYTES, UNSEQUENCED, Frame, Header, Kind, Parser, encode
from thinwire.link.heartbeat import TOKEN, Heartbeat, read_token
from thinwire.link.hello import Hello, PeerBehind, PeerReplaced, Terms, decode_hello, judge, make_hello
from thinwire.link.inbox import Inbox, decode_ack
from thinwire.link.meter import Meter
from thinwire.link.options import LINGER_SECONDS, MAX_REASON_LETTERS, LinkOptions
from thinwire.link.outbox import Outbox
from thinwire.link.roster import Place
from thinwire.shown import shown

LOG = logging.getLogger("thinwire.link")
SMALL_BATCH = 16 * 2**10
LARGE_BATCH = 256 * 2**10


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
        self._parser = Parser(self._check)
        self._incarnation: int | None = None
        self._stopped = False
        self._telling = False
        self._ending_at: float | None = None
        self._batch = SMALL_BATCH
        self._arrived = 0
        """Bytes that had come out at the other end when it was last asked for a sign of life, or last doubted."""
        now = time.monotonic()
        self.heartbeat = Heartbeat(options)
        self._hello_deadline = now
        self.broken_since = now
        self._problem = "the peer has not connected yet" if dialer is None else ""
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
        is_open = self.state == "open"
        if self._connection is not None:
            if not is_open and now >= self._hello_deadline:
                self._lose(f"no HELLO within {self.options.establish_seconds} s")
            elif self.heartbeat.silent(now):
                self._lose(f"silent for {self.options.silent_seconds} s")
            elif is_open and (token := self.heartbeat.ping(now)) is not None:
                self._arrived, _ = self._connection.underway()
                self.outbox.put_urgent(self._frame(Kind.PING, TOKEN.pack(token)))
        is_open = self.state == "open"
        if not is_open and now >= self.broken_since + self.options.reconnect_seconds:
            problem = self._problem or (self.dialer.problem if self.dialer else "")
            text = f"no connection to {self.peer} for {self.options.reconnect_seconds} s (last problem: {problem}); "
            self._fail(LinkError(text + "check that it runs, its address in the roster, and firewalls"), tell=False)
        elif self.dialer is not None:
            if self._connection is None or (is_open and self._doubtful(now)):
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
            self._lose(f"sending failed: {error.strerror or error}")
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
        if self._connection is not None:
            if self._ending_at is None:
                times.append(self.heartbeat.next_at(now) if self.state == "open" else self._hello_deadline)
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
        try:
            patient = self._incarnation is not None
            connection = self.dialer.progress(time.monotonic(), self._selector, self._dialled, patient=patient)
        except LinkError as error:
            self._fail(error, tell=False)
            self.stop()
            return
        if connection is not None:
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        """Use a new connection instead of the old one, from here on: the sequence in HELLO must not grow behind its back."""
        if (self._ending_at is not None and not self._telling) or self._stopped:
            connection.close()
            return
        now = time.monotonic()
        if self.state == "open":
            self.broken_since = now
        self._drop()
        if not self._telling:
            self.state = "hello"
        self._connection = connection
        self.congestion = connection.congestion
        self.meter.absorb(connection.meter)
        connection.meter = self.meter
        self._parser, self._batch = Parser(self._check), SMALL_BATCH
        self.heartbeat.begin(now)
        self._hello_deadline = now + self.options.establish_seconds
        self._selector.register(connection.socket, selectors.EVENT_READ, self._readable)
        hello = encode(self._frame(Kind.HELLO, self._hello().encode()))
        self.meter.sent.framed[0] += len(hello)
        try:
            connection.write([hello], now)
            connection.wire = self.wire
            connection.flush(now)
        except OSError as error:
            self._lose(f"sending HELLO failed: {error.strerror or error}")
            return
        self._take_in(connection.records)  # HELLO may have come with the handshake

    def _hello(self) -> Hello:
        return make_hello(self.terms, self.contract.epoch, self.options, self.inbox.received, self.inbox.consumed(), self.newest or 0)

    def _frame(self, kind: Kind, payload: bytes) -> Frame:
        return Frame.make(kind, payload, epoch=self.contract.epoch)

    def _readable(self) -> None:
        if self._connection is not None:
            self._take_in(self._connection.read)

    def _take_in(self, read: Callable[[], list[bytes]]) -> None:
        """Handle what a read gives."""
        try:
            before = self.meter.received.socket
            records = read()
            if records or self.meter.received.socket > before:  # on a slow line a record takes long to be whole
                self.heartbeat.heard(time.monotonic())
            for record in records:
                if self._telling or self._stopped:
                    return  # after a refusal only the end of the stream matters
                for frame in self._parser.feed(record):
                    self._handle(frame)
                    if self._connection is None or self._telling or self._stopped:
                        return
        except ProtocolError as error:
            self._fail(error, tell=True)
        except ssl.SSLError as error:
            # the peer has finished its handshake only when it answers: its refusal of our certificate arrives here
            if self.state == "hello" and "ALERT" in (error.reason or ""):
                self._fail(refused(self.peer, error), tell=False)
            else:
                self._lose(f"TLS: {error.reason or error}")
        except OSError as error:
            self._lose(str(error.strerror or error))
        finally:
            self.inbox.announce()

    def _check(self, header: Header) -> None:
        """Refuse a header that this state or the contract does not allow."""
        if header.kind in UNSEQUENCED:
            self.contract.check_unsequenced(header)
            if (header.kind is Kind.HELLO) != (self.state == "hello") and header.kind is not Kind.ABORT:
                raise ProtocolError("kind", header.kind.name, "HELLO first, and once")
        elif self.state != "open":
            raise ProtocolError("kind", header.kind.name, "HELLO first")
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
        elif header.kind is Kind.HELLO:
            self._greet(decode_hello(frame.payload), now)
        else:
            reason = shown(bytes(frame.payload).decode(errors="replace"), MAX_REASON_LETTERS)
            self._fail(aborted(f"{self.peer} aborted the link", reason), tell=False)

    def _greet(self, theirs: Hello, now: float) -> None:
        """Compare the peer's HELLO with ours and open, or say what differs."""
        try:
            judge(self._hello(), theirs, self.peer, self.newest, heard=self._incarnation is not None)
        except PeerBehind as error:
            self._lose(str(error))
        except PeerReplaced as error:
            self._turn_away(str(error), now)
        except LinkError as error:
            self._fail(error, tell=not isinstance(error, Replaced) and not (isinstance(error, Interrupted) and error.epoch))
        else:
            self.outbox.rewind(theirs.received, theirs.consumed)
            self._incarnation = self.newest = theirs.incarnation
            self._problem = ""
            self.state = "open"
            self.meter.connections += 1
            if self.dialer is not None:
                self.dialer.succeeded()
            self.opened.set()

    def _turn_away(self, reason: str, now: float) -> None:
        """Tell an old process that it has been replaced; the link waits for the new one."""
        assert self._connection is not None
        with suppress(OSError):  # it will ask again
            self._connection.write([encode(self._frame(Kind.ABORT, reason.encode()))], now)
            self._connection.flush(now)
            self._connection.end_output()
        self._lose(reason)

    def _said_goodbye(self, now: float) -> None:
        """Acknowledge the peer's goodbye and wait for it to hang up."""
        error = LinkClosed(f"{self.peer} has closed the link")
        self.inbox.end(error)
        self.outbox.fail(error)
        self.outbox.put_urgent(self._frame(Kind.ACK, self.inbox.acknowledgement()))
        self._ending_at = now + LINGER_SECONDS

    def _lose(self, problem: str) -> None:
        """Go on without the connection; the link stays."""
        now = time.monotonic()
        self._drop()
        if self._ending_at is not None:
            self._stopped = not (self._telling and self.outbox.waiting)
            return
        LOG.info("lost the connection to %s: %s", self.peer, problem)
        self._problem = problem
        if self.state == "open":
            self.broken_since = now
        self.state = "broken"
        if self.dialer is not None and not self.dialer.busy:
            self.dialer.back_off(now)

    def reset(self) -> None:
        """Break the TCP connection, as a fault would (call it through `call`)."""
        if self._connection is not None:
            self._connection.reset()
            self._lose("reset by a test")

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
        text = shown(str(error) if reason is None else reason, MAX_REASON_LETTERS)
        self.outbox.put_urgent(self._frame(Kind.ABORT, text.encode()))
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
