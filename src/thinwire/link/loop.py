"""The I/O thread of one link: it alone drives the session, and waits in the transport. Other threads `call` it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from thinwire.link.errors import Abort, LinkError
from thinwire.link.session import Session
from thinwire.link.transport import ByteStream, Transport
from thinwire.util.runtime import Runtime

LOG = logging.getLogger("thinwire.link")


class Loop:
    """A session and the thread that drives it."""

    def __init__(self, session: Session, transport: Transport, runtime: Runtime, finished: Callable[[], None]) -> None:
        """`finished` is called when the thread ends."""
        self.session, self._transport, self._now, self._finished = session, transport, runtime.now, finished
        self.wake = transport.wake
        self._commands: deque[Callable[[], None]] = deque()
        self._lock, self._closed = runtime.lock(), False
        self.thread = runtime.thread(f"thinwire-link to {session.peer}", self._run)

    def call(self, command: Callable[[], None]) -> bool:
        """Have the thread run something; return False if it has ended."""
        with self._lock:
            if self._closed:
                return False
            self._commands.append(command)
        self.wake()
        return True

    def adopt(self, stream: ByteStream) -> None:
        """Take over a stream from a listener."""
        if not self.call(lambda: self.session.adopt(stream, self._now())):
            stream.end("close")

    def abort(self, reason: str, code: Abort) -> None:
        """Fail on purpose."""
        self.call(lambda: self.session.abort(reason, code, self._now()))

    def reset(self) -> None:
        """Break the connection, as a fault would."""
        self.call(lambda: self.session.reset(self._now()))

    def _run(self) -> None:
        session = self.session
        try:
            while not session.stopped:
                self._obey()
                now = self._now()
                session.tend(now)
                session.pump(now)
                if not session.stopped:
                    for stream in self._transport.wait(session.streams(), session.pause(self._now())):
                        session.ready(stream, self._now())
        except Exception as error:  # a defect here must reach the callers instead of ending the thread in silence
            LOG.exception("the I/O thread of the link to %s failed", session.peer)
            session.fail(LinkError(f"internal error in the link to {session.peer}: {error!r}"), self._now(), tell=False)
        finally:
            self._dispose()

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _dispose(self) -> None:
        """Leave nothing behind; the last commands are obeyed: a stream handed over too late is closed."""
        self.session.stopped = True
        with self._lock:
            self._closed = True
        self._obey()
        self.session.dispose()
        self._transport.close()
        self._finished()
