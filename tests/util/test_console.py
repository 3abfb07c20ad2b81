"""The console of Windows, by a stand-in for its functions: who ignores Ctrl-C, and what a closed window leads to."""

from __future__ import annotations

import ctypes
import signal
import threading
from types import SimpleNamespace

import pytest

from patience import HANG
from thinwire.run.stop import Stop
from thinwire.util.console import closing_console, interrupts_ignored


class Console:
    """The handlers of a console, and what was asked of it."""

    def __init__(self) -> None:
        self.handlers: list = []
        self.ignores = False
        self.kernel32 = SimpleNamespace(SetConsoleCtrlHandler=self.set)

    def set(self, handler, add) -> int:
        if handler is None:
            self.ignores = add
        elif add:
            self.handlers.append(handler)
        else:
            self.handlers.remove(handler)
        return 1


@pytest.fixture
def console(monkeypatch) -> Console:
    console = Console()
    monkeypatch.setattr(ctypes, "windll", console, raising=False)
    monkeypatch.setattr(ctypes, "WINFUNCTYPE", lambda *types: lambda function: function, raising=False)
    return console


def test_children_ignore_ctrl_c_and_this_process_only_meanwhile(console):
    before = signal.getsignal(signal.SIGINT)
    with interrupts_ignored():
        assert console.ignores and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert not console.ignores and signal.getsignal(signal.SIGINT) is before


def test_a_closed_window_ends_the_run_at_once_and_is_held_open_until_then(console):
    stop, answers = Stop(), []
    with stop.listening():
        (handler,) = console.handlers
        assert not handler(0) and not stop.asked  # Ctrl-C is a signal, and none of its business
        thread = threading.Thread(target=lambda: answers.append(handler(2)))
        thread.start()
        while not stop.now:
            thread.join(0.01)
        assert answers == [] and thread.is_alive()  # the system ends the process when the handler returns
    thread.join(HANG)
    assert answers == [True] and console.handlers == []


def test_other_systems_have_no_such_thing(monkeypatch):
    monkeypatch.delattr(ctypes, "windll", raising=False)
    with closing_console(lambda: pytest.fail("nobody closed anything")), interrupts_ignored():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
