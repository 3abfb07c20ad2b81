"""Several machines on one: network namespaces in a chain, a real kernel's TCP in each, a shaped path between neighbours.

    with Testbed([Path(rate_mbps=80, delay_ms=25)]) as bed:
        server = bed.popen(1, ["python", "serve.py", bed.address(1, towards=0)])
        bed.run(0, ["python", "dial.py", bed.address(1, towards=0)], timeout=30)

Linux and root only. Files and the process table are shared; only the network is apart. Everything started in a host is killed at the end
of the block, however it ends; after a SIGKILL of the owner, `python -m testbed clean` removes what is left.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as File
from types import FrameType, TracebackType
from typing import Any, Self

from testbed import namespaces
from testbed.path import Path

FORWARDER = File(__file__).with_name("forward.py")
STOP_SECONDS = 5.0
READY_SECONDS = 20.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

SYSCTLS = {
    # The kernel's stock limits, pinned because small machines have less: enough for 150 ms x 80 Mbit/s with cubic and BBR (measured).
    "net.ipv4.tcp_rmem": "4096 131072 33554432",
    "net.ipv4.tcp_wmem": "4096 16384 4194304",
    "net.ipv4.tcp_no_metrics_save": "1",  # a connection must not start from what the one before learnt
    "net.ipv6.conf.all.disable_ipv6": "1",  # no neighbour discovery among the counted packets
    "net.ipv6.conf.default.disable_ipv6": "1",
}
ROUTED = {"net.ipv4.ip_forward": "1", "net.ipv4.conf.all.rp_filter": "0", "net.ipv4.conf.default.rp_filter": "0"}


class Testbed:
    """Hosts 0, 1, ... in a chain, one path between each two neighbours.

    Only neighbours reach each other; with `routed` the hosts in between forward, so that any two do (gloo connects all pairs).
    """

    __test__ = False  # not a test class, whatever pytest thinks of the name

    def __init__(self, paths: Sequence[Path], *, routed: bool = False, sysctls: Mapping[str, str] | None = None, seed: int = 0) -> None:
        if not 1 <= len(paths) <= 250:
            raise ValueError(f"{len(paths)} paths given; a testbed needs 1 to 250, one between each two neighbours")
        self.paths, self.routed, self.seed = list(paths), routed, seed
        self.sysctls = {**SYSCTLS, **(ROUTED if routed else {}), **(sysctls or {})}
        self.hosts: list[str] = []
        self.processes: list[subprocess.Popen[Any]] = []
        self.forwarders: list[subprocess.Popen[str]] = []
        self.handlers: dict[int, Any] = {}
        self.owner = os.getpid()

    def __enter__(self) -> Self:
        if reason := namespaces.obstacle():
            raise ValueError(reason)
        self.catch_signals()
        atexit.register(self.close)
        try:
            for name in namespaces.names(len(self.paths) + 1):
                self.hosts.append(name)
                namespaces.ip("netns", "add", name)
                namespaces.ip("-n", name, "link", "set", "lo", "up")
                namespaces.set_sysctls(name, self.sysctls)
            for index in range(len(self.paths)):
                self.connect(index)
            if self.routed:
                self.add_routes()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def connect(self, index: int) -> None:
        """Start the forwarder of a path and give its two devices their addresses."""
        order = {
            "device": f"path{index}", "namespaces": self.hosts[index : index + 2],
            "shapes": self.paths[index].shapes(), "seed": f"{self.seed} {index}",
        }  # fmt: skip
        # A session of its own: Ctrl-C reaches the programs in the hosts, which may want to say goodbye over the path.
        forwarder = subprocess.Popen(
            [sys.executable, "-I", "-S", str(FORWARDER), json.dumps(order)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.forwarders.append(forwarder)
        if self.answer(index) != "ready\n":
            raise ValueError(f"the forwarder of path {index} did not start; its message is above")
        for host, peer in ((index, index + 1), (index + 1, index)):
            name, device = self.hosts[host], self.interface(host, towards=peer)
            addresses = (self.address(host, towards=peer), "peer", self.address(peer, towards=host))
            namespaces.ip("-n", name, "address", "add", *addresses, "dev", device)
            namespaces.ip("-n", name, "link", "set", device, "txqueuelen", "5000", "up")

    def add_routes(self) -> None:
        """Lead every host to the paths it is not on, through its neighbour on that side."""
        for host, name in enumerate(self.hosts):
            for index in range(len(self.paths)):
                if index in (host - 1, host):
                    continue
                neighbour = host + 1 if index > host else host - 1
                namespaces.ip("-n", name, "route", "add", f"198.18.{index}.0/24", "via", self.address(neighbour, towards=host))

    def answer(self, index: int) -> str:
        """Read a line from a forwarder, or kill it: it must not hold the run."""
        forwarder = self.forwarders[index]
        assert forwarder.stdout is not None
        timer = threading.Timer(READY_SECONDS, forwarder.kill)
        timer.start()
        try:
            return forwarder.stdout.readline()
        finally:
            timer.cancel()

    def address(self, host: int, towards: int) -> str:
        """Return the address of a host on its path to a neighbour (198.18.0.0/15 is reserved for benchmarks)."""
        return f"198.18.{self.path_between(host, towards)}.{1 if host < towards else 2}"

    def interface(self, host: int, towards: int) -> str:
        """Return the device of a host on its path to a neighbour."""
        return f"path{self.path_between(host, towards)}"

    def path_between(self, host: int, towards: int) -> int:
        if abs(host - towards) != 1 or not 0 <= min(host, towards) < len(self.paths):
            raise ValueError(f"hosts {host} and {towards} are not neighbours in a chain of {len(self.paths) + 1}")
        return min(host, towards)

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a host; its pid is the program's own."""
        process = subprocess.Popen(["ip", "netns", "exec", self.hosts[host], *command], **options)
        self.processes.append(process)
        return process

    def run(self, host: int, command: Sequence[str], timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a program in a host to its end; raise if it fails or takes too long."""
        return subprocess.run(["ip", "netns", "exec", self.hosts[host], *command], timeout=timeout, check=True, **options)

    def counters(self, index: int) -> dict[str, Any]:
        """Ask a forwarder for its processor seconds and, per direction, packets, carried bytes, lost, dropped, latest wake-up (s)."""
        control = self.forwarders[index].stdin
        assert control is not None
        control.write("counters\n")
        control.flush()
        return json.loads(self.answer(index))

    def catch_signals(self) -> None:
        """Let SIGTERM and SIGHUP unwind the block, as Ctrl-C does, unless the program handles them itself."""
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self.handlers[number] = signal.signal(number, leave)

    def close(self) -> None:
        """Kill what runs in the hosts, stop the forwarders, delete the namespaces; no signal interrupts it."""
        if self.owner != os.getpid():  # a forked copy of the owner has nothing to tear down
            return
        errors: list[Exception] = []
        with deferred({signal.SIGINT, *self.handlers}):
            for process in [*self.processes, *self.forwarders]:
                attempt(lambda process=process: end(process), errors)
            for name in [name for name in self.hosts if namespaces.exists(name)]:
                attempt(lambda name=name: namespaces.remove(name), errors)
            self.processes, self.forwarders, self.hosts = [], [], []
            atexit.unregister(self.close)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}
        if errors:
            raise ExceptionGroup("the testbed left something behind", errors)


@contextlib.contextmanager
def deferred(numbers: Iterable[int]) -> Iterator[None]:
    """Hold signals back until the end of the block. Only the main thread runs handlers; another needs no guard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived[:1]:
            os.kill(os.getpid(), number)


def attempt(action: Callable[[], None], errors: list[Exception]) -> None:
    """Go on with the teardown whatever one part of it meets."""
    try:
        action()
    except (ValueError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        errors.append(error)


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and collect it; the pipes stay with whoever reads them."""
    if process.poll() is None:
        process.kill()
    process.wait(STOP_SECONDS)
