"""The console of Windows: Ctrl-C that children do not get, and a window that is closed. Other systems have signals for both.

Windows ends a process when its handler of a closing console has returned, or after some seconds: the handler waits until the run is over.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CLOSING = (2, 5, 6)
"""Events of a console: its window is closed, the user logs off, the machine is shut down."""
CLOSING_SECONDS = 30.0
"""How long a handler waits at most; the system has its own, shorter limit."""


def console_functions() -> Any | None:
    """Return the functions of the console, None on systems that do not have them."""
    windows = getattr(ctypes, "windll", None)
    return None if windows is None else windows.kernel32


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C inside this block; processes that are started in it ignore it from their first moment on."""
    functions = console_functions()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if functions is not None:
            functions.SetConsoleCtrlHandler(None, True)
        yield
    finally:
        if functions is not None:
            functions.SetConsoleCtrlHandler(None, False)
        signal.signal(signal.SIGINT, before)


@contextmanager
def closing_console(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell`, in a thread of the system, if the console is closed inside this block, and hold the end off until the block is left."""
    functions = console_functions()
    if functions is None:
        yield
        return
    over = threading.Event()

    def handle(event: int) -> bool:
        if event not in CLOSING:
            return False
        tell()
        over.wait(CLOSING_SECONDS)
        return True

    handler = ctypes.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint)(handle)  # type: ignore[attr-defined]
    functions.SetConsoleCtrlHandler(handler, True)
    try:
        yield
    finally:
        over.set()
        functions.SetConsoleCtrlHandler(handler, False)
