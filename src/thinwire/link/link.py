"""Link: framed, authenticated, resumable, metered and paced byte messages between two workers.

What a caller uses. The connection lives in one I/O thread (`loop.py`); `send` and `receive` only touch bounded queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypedDict, Unpack

from thinwire.config.profiles import OPEN, LinkProfile
from thinwire.link.contract import Contract
from thinwire.link.dial import Dialer
from thinwire.link.emulate import make_wire
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import Abort, LinkError, ProtocolError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.heartbeat import TOKEN
from thinwire.link.hello import Terms
from thinwire.link.listener import Listener
from thinwire.link.loop import Loop
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker
from thinwire.link.session import Session, Setup
from thinwire.link.transport import ByteStream

ECHO_TOKENS = 2**63
"""Tokens of a probe's PINGs begin here, those of the heartbeat at 1."""


def leave_to_users(error: LinkError) -> None:
    """Leave a failure to those who use the link."""


def nothing() -> None:
    """Tell nobody that a link has ended."""


class More(TypedDict, total=False):
    """What a link may be told besides."""

    options: LinkOptions | None
    profile: LinkProfile
    """The line to emulate."""
    peer_profile: LinkProfile | None
    """The peer's line, if it is another."""
    failed: Callable[[LinkError], None]
    """Told of a failure, by the I/O thread."""
    newest: int | None
    """The newest incarnation of the peer that was met on an earlier link."""
    service: str | None
    """What the peer's listener is asked for, if not for the link of two neighbours."""


class Link:
    """One end of the path between two workers. Make it with `connect` or `listen`; it opens in the background."""

    def __init__(
        self,
        peer: Worker,
        terms: Terms,
        contract: Contract,
        endpoint: Endpoint,
        address: str | tuple[str, int],
        *,
        listener: Listener | None = None,
        calls: bool = False,
        **more: Unpack[More],
    ) -> None:
        """Make one end, which waits in the transport of an address; `calls`: it dials the peer, `listener`: who hands its streams over."""
        options, profile = more.get("options") or LinkOptions(), more.get("profile", OPEN)
        self.peer, self.options, self.epoch = peer.id, options, contract.epoch
        self._runtime = endpoint.runtime
        self._waiting, self._crossings, self._echo_token = [False for _ in Channel], 0, ECHO_TOKENS
        if listener is not None:
            listener.check_free(self.peer)
        transport, self._opened = endpoint.transport(address), endpoint.runtime.event()
        dial = partial(transport.dial, peer, options, more.get("service"))
        setup = Setup(
            peer=self.peer,
            terms=terms,
            contract=contract,
            options=options,
            wire=make_wire(profile, more.get("peer_profile") or profile, options.pace_mbps, seed=terms.worker_id.stage),
            dialer=Dialer(dial, options, endpoint.runtime.uniform) if calls else None,
            fingerprint=endpoint.identity.fingerprint,
            newest=more.get("newest"),
            opened=self._opened.set,
            failed=more.get("failed", leave_to_users),
        )
        self._session = Session(setup, endpoint.runtime)
        finished = partial(listener.forget, self.peer) if listener is not None else nothing
        self._loop = Loop(self._session, transport, endpoint.runtime, finished)
        self.meter, self._outbox, self._inbox = self._session.meter, self._session.outbox, self._session.inbox
        if listener is not None:
            listener.expect(self.peer, self._loop.adopt)
        self._loop.thread.start()

    @classmethod
    def connect(cls, peer: Worker, endpoint: Endpoint, terms: Terms, contract: Contract, **more: Unpack[More]) -> Link:
        """Dial the peer's address, again and again inside the reconnect window."""
        assert peer.address is not None
        return cls(peer, terms, contract, endpoint, peer.address, calls=True, **more)

    @classmethod
    def listen(cls, listener: Listener, peer: Worker, terms: Terms, contract: Contract, **more: Unpack[More]) -> Link:
        """Wait for the peer to dial a listener that knows its certificate."""
        return cls(peer, terms, contract, listener.endpoint, listener.where, listener=listener, **more)

    @classmethod
    def accept(cls, listener: Listener, stream: ByteStream, peer: Worker, terms: Terms, contract: Contract, **more: Unpack[More]) -> Link:
        """Use one stream that a listener has handed to a service; no other follows it."""
        link = cls(peer, terms, contract, listener.endpoint, listener.where, **more)
        link._loop.adopt(stream)
        return link

    def wait_open(self, timeout: float | None = None) -> None:
        """Return once the link has opened; raise why it did not."""
        if not self._opened.wait(timeout):
            raise TimeoutError(f"the link to {self.peer} did not open in {timeout} s")
        if self._session.error is not None:
            raise self._session.error

    def send(self, frame: Frame, timeout: float | None = None) -> None:
        """Queue a frame and return; block only while the channel's credit is used up (TimeoutError). A wrong frame aborts the link."""
        try:
            with self._call(frame.header.channel):
                self._outbox.put(frame, timeout)
        except ProtocolError as error:
            self.abort(str(error), error.code)
            raise
        self._loop.wake()

    def receive(self, channel: Channel, timeout: float | None = None, *, basis_version: int | None = None) -> Frame:
        """Return the next frame of a channel (TimeoutError if none comes). DATA in another basis than the given one aborts the link."""
        with self._call(channel):
            frame = self._inbox.take(channel, timeout)
        if self._inbox.report_due:
            self._loop.wake()
        header = frame.header
        if basis_version is not None and header.kind is Kind.DATA and header.basis_version != basis_version:
            error = ProtocolError(
                "basis_version", header.basis_version, basis_version, f"step {header.step}, microbatch {header.microbatch}"
            )
            self.abort(str(error), error.code)
            raise error
        return frame

    @contextmanager
    def _call(self, channel: Channel) -> Iterator[None]:
        """Note that a caller may have to wait for the peer."""
        self._waiting[channel] = True
        try:
            yield
        finally:
            self._waiting[channel] = False
            if channel is not Channel.BULK:
                self._crossings += 1

    @property
    def waiting(self) -> bool:
        """Tell whether whoever computes waits for the peer now; copies of checkpoints, on the bulk channel, have threads of their own."""
        return any(waits for channel, waits in zip(Channel, self._waiting, strict=True) if channel is not Channel.BULK)

    @property
    def crossings(self) -> int:
        """Return a number that grows with every frame that whoever computes has sent or taken."""
        return self._crossings

    def close(self) -> bool:
        """Deliver what is queued, say goodbye and end the thread; return whether the peer, still there, acknowledged all of it."""
        self._loop.call(self._outbox.finish)  # by the I/O thread: a goodbye must not overtake an abort that was asked for before
        self._loop.thread.join(self.options.close_seconds)
        self._loop.call(self._session.stop)
        self._loop.thread.join()
        return self._outbox.delivered

    def wait_ended(self, timeout: float) -> None:
        """Return when a link that failed has told its peer, or has given that up."""
        self._loop.thread.join(timeout)

    def abort(self, reason: str, code: Abort = Abort.LOST) -> None:
        """Fail both ends with a reason; calls that wait raise the error that the code means."""
        self._loop.abort(reason, code)

    def echo(self, size: int, count: int, timeout: float) -> list[float]:
        """Send PINGs of a size on the bulk channel; return when they were queued and when each PONG came. The peer's link answers.

        A connection that is lost takes PINGs and PONGs with it: all go again over the next one. How long that is waited for is the link's
        affair; the time-out is for an open one.
        """
        while (times := self._echo_once(size, count, timeout)) is None:
            pass
        return times

    def _echo_once(self, size: int, count: int, timeout: float) -> list[float] | None:
        """Do it over one connection; return None if that was lost meanwhile."""
        first, connections = self._echo_token, self.meter.connections
        self._echo_token += count
        tokens = range(first, first + count)
        self._session.heartbeat.echoes.update(dict.fromkeys(tokens, 0.0))
        filler = bytes(max(0, size - TOKEN.size))
        started = self._runtime.now()
        for token in tokens:
            self._outbox.put_plain(Frame.make(Kind.PING, TOKEN.pack(token) + filler, channel=Channel.BULK, epoch=self.epoch))
        self._loop.wake()
        deadline = started + timeout
        try:
            while not all(self._session.heartbeat.echoes[token] for token in tokens):
                if self._session.error is not None:
                    raise self._session.error
                if self.meter.connections != connections:
                    return None
                if self._session.state in ("connecting", "hello", "broken"):
                    deadline = self._runtime.now() + timeout
                if self._runtime.now() > deadline:
                    raise TimeoutError(f"{count} echoes of {size} bytes did not come back in {timeout} s")
                self._runtime.sleep(0.002)
            return [started, *(self._session.heartbeat.echoes[token] for token in tokens)]
        finally:
            for token in tokens:
                del self._session.heartbeat.echoes[token]

    def reset_connection(self) -> None:
        """Break the TCP connection abruptly; for fault tests."""
        self._loop.reset()

    @property
    def newest(self) -> int | None:
        """Return the newest incarnation of the peer that was met."""
        return self._session.reception.newest

    @property
    def state(self) -> str:
        """Return connecting, hello, open, broken, closed or failed."""
        return self._session.state

    @property
    def absent_seconds(self) -> float:
        """Return for how long the peer has not been there; 0 while the link is open, and after its end."""
        waiting = self._session.state in ("connecting", "hello", "broken")
        return self._runtime.now() - self._session.broken_since if waiting else 0.0

    @property
    def heard_at(self) -> float:
        """Return when the last byte came over the present connection, or the one before; 0: there was none."""
        return self._session.heartbeat.heard_at

    @property
    def problem(self) -> str:
        """Return why there is no connection; nothing while there is one."""
        return "" if self.state == "open" else self._session.problem.text

    @property
    def refused(self) -> bool:
        """Tell whether the peer was reached and did not want this worker: another one may hold its worker id."""
        return self.state != "open" and self._session.problem.refusal

    @property
    def error(self) -> LinkError | None:
        """Return why the link failed."""
        return self._session.error

    @property
    def rtt(self) -> float | None:
        """Return the smoothed round trip in seconds; None before the first PONG."""
        return self._session.heartbeat.rtt

    @property
    def congestion(self) -> str:
        """Return TCP's congestion control on the last connection."""
        return self._session.congestion

    def held(self, channel: Channel) -> tuple[int, int]:
        """Return frames and bytes received but not taken."""
        return self._inbox.held(channel)

    def outstanding(self, channel: Channel) -> tuple[int, int]:
        """Return frames and bytes sent but not taken by the peer."""
        return self._outbox.outstanding(channel)
