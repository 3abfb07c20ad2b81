"""Wake a thread that waits in a selector, and give it things to do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable


class Doorbell:
    """A socket pair whose reading end the thread watches, and its list of commands."""

    def __init__(self) -> None:
        self.socket, self._button = socket.socketpair()
        """The end to watch; call `answer` when it is readable."""
        self.socket.setblocking(False)
        self._button.setblocking(False)
        self._ringing = False
        self._closed = False
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the thread; once is enough until it answers."""
        if not self._ringing:
            self._ringing = True
            with contextlib.suppress(OSError):
                self._button.send(b"x")

    def answer(self) -> None:
        """Hear the bell; look at every queue after this, not before."""
        with contextlib.suppress(BlockingIOError):
            self.socket.recv(4096)
        self._ringing = False

    def call(self, command: Callable[[], None]) -> bool:
        """Have the thread run something; return False if it has ended."""
        with self._lock:
            if self._closed:
                return False
            self._commands.append(command)
        self.ring()
        return True

    def obey(self) -> None:
        """Run what was asked for; called by the thread."""
        while self._commands:
            self._commands.popleft()()

    def close(self) -> None:
        """Take no more commands and run the last ones."""
        with self._lock:
            self._closed = True
        self.obey()
        self.socket.close()
        self._button.close()
