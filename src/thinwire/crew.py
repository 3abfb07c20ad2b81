"""Worker processes on this machine, one per stage: start them for a task, watch them, and leave none behind.

The workers talk over real links on the loopback address, with identities made for this crew and forgotten after it. What a worker has to
say reaches this process through its own pipe; if this process dies, the pipe closes and the workers end themselves.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from thinwire.config import RunConfig
from thinwire.configfile import from_toml, to_toml
from thinwire.link.errors import LinkError
from thinwire.link.roster import Place, Roster, Worker, read_roster, write_roster
from thinwire.link.tls import load_identity, make_identity
from thinwire.seat import Seat
from thinwire.stop import Stop

GRACE_SECONDS = 10.0
"""How long to wait for the worker whose failure explains a lost link."""
END_SECONDS = 2.0
"""How long a worker may take to end on its own."""
MESSAGE_BYTES = 2**26
"""Longest message between supervisor and worker."""

Say = Callable[[dict[str, Any]], None]
"""How a worker tells the supervisor something, as JSON."""
Task = Callable[..., dict[str, Any]]
"""What every worker does: a module's function of (seat, say, stop, **arguments) that returns what it found."""
Hear = Callable[[int, dict[str, Any]], None]
"""What the supervisor does with what a stage says."""


@dataclass
class Child:
    """A worker process and the pipe to it."""

    stage: int
    process: Any
    pipe: Connection
    result: dict | None = None
    failure: str | None = None
    lost_link: bool = False
    """Whether the failure is that of a link, which has its cause elsewhere."""

    @property
    def running(self) -> bool:
        return self.result is None and self.failure is None


def run_crew(task: Task, config: RunConfig, arguments: dict[str, Any], hear_of: Hear, *, graceful: bool = True) -> list[dict[str, Any]]:
    """Let one process per stage do a task; return what each of them returned. A task that is not `graceful` ends at the first Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="thinwire-") as scratch, ExitStack() as stack:
        folder, stop = Path(scratch), Stop()
        make_local_roster(folder, config.pipeline.stages)
        children: list[Child] = []
        stack.callback(end_all, children)
        context = forkserver()
        for stage in range(config.pipeline.stages):
            children.append(start(context, task, config, arguments, folder, stage))
        if graceful:
            stack.enter_context(stop.listening())
        return watch(children, hear_of, stop)


def forkserver() -> ForkServerContext:
    """Return a context whose processes are forked from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.train", "thinwire.pipeline.worker"])
    # A terminal's Ctrl-C reaches every process. Started like this, the server and the workers ignore it from their first moment on;
    # the supervisor's wish to stop comes through their pipes.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    return context


def make_local_roster(folder: Path, stages: int) -> None:
    """Make identities and a roster for workers on this machine; each listens on a free port of the loopback address."""
    workers = []
    for stage, port in enumerate(free_ports(stages)):
        identity = make_identity(folder / f"stage-{stage}", f"stage-{stage}", days=3650)
        workers.append(Worker(Place(0, stage), identity.certificate, f"127.0.0.1:{port}"))
    write_roster(folder / "roster.toml", Roster.of(workers))


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start(context: ForkServerContext, task: Task, config: RunConfig, arguments: dict[str, Any], folder: Path, stage: int) -> Child:
    """Start the worker of a stage."""
    ours, theirs = context.Pipe()
    given = (theirs, task, to_toml(config), json.dumps(arguments), str(folder), stage)
    process = context.Process(target=work, args=given, name=f"thinwire-stage-{stage}", daemon=True)
    process.start()
    theirs.close()
    return Child(stage, process, ours)


def work(pipe: Connection, task: Task, settings: str, arguments: str, scratch: str, stage: int) -> None:
    """Be the worker of a stage: do the task, then report its result or what went wrong."""
    # Signals for the whole process group reach the supervisor too, which asks everyone to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop = Stop(supervised=True)
    threading.Thread(target=heed, args=(pipe, stop), daemon=True).start()
    folder = Path(scratch)
    try:
        identity, roster = load_identity(folder / f"stage-{stage}"), read_roster(folder / "roster.toml")
        seat = Seat(config=from_toml(settings), roster=roster, identity=identity, stage=stage)
        say(pipe, {"result": task(seat, partial(say, pipe), stop, **json.loads(arguments))})
    except ValueError as error:
        say(pipe, {"refused": str(error)})
        sys.exit(1)
    except BaseException as error:
        say(pipe, {"failed": traceback.format_exc(), "lost_link": isinstance(error, LinkError)})
        sys.exit(1)


def say(pipe: Connection, message: dict[str, Any]) -> None:
    """Send a message between supervisor and worker: JSON, never a pickle."""
    pipe.send_bytes(json.dumps(message).encode())


def hear(pipe: Connection) -> dict[str, Any]:
    """Receive a message."""
    return json.loads(pipe.recv_bytes(MESSAGE_BYTES))


def heed(pipe: Connection, stop: Stop) -> None:
    """Wait for a word of the supervisor: a wish to stop, or its end, which is this worker's end too."""
    try:
        while hear(pipe) == {"stop": True}:
            stop.asked = True
    except (EOFError, OSError):
        os._exit(1)


def watch(children: list[Child], hear_of: Hear, stop: Stop) -> list[dict[str, Any]]:
    """Wait for all workers; pass on a wish to stop; raise what the first failure said."""
    asked = False
    while any(child.running for child in children):
        collect(children, hear_of)
        if any(child.failure for child in children):
            linger(children, hear_of)
            raise first_failure(children)
        if stop.asked and not asked:
            asked = True
            print("stopping after the step under way; Ctrl-C again ends at once", flush=True)
            ask_to_stop(children)
    return [child.result for child in children if child.result is not None]


def collect(children: list[Child], hear_of: Hear, timeout: float = 0.5) -> None:
    """Take what the workers have to say."""
    open_pipes = {child.pipe: child for child in children if child.running}
    for pipe in wait(list(open_pipes), timeout):
        child = open_pipes[pipe]  # type: ignore[index]
        try:
            message = hear(child.pipe)
        except (EOFError, OSError):
            child.process.join(1)
            child.failure = f"the worker ended without a word (exit code {child.process.exitcode})"
            continue
        if "result" in message:
            child.result = message["result"]
        elif "refused" in message or "failed" in message:
            child.failure = message.get("refused") or message["failed"]
            child.lost_link = message.get("lost_link", False)
        else:
            hear_of(child.stage, message)


def ask_to_stop(children: list[Child]) -> None:
    """Pass the wish on; a worker that has just ended is found out by `collect`."""
    for child in children:
        if child.running:
            with suppress(OSError):
                say(child.pipe, {"stop": True})


def linger(children: list[Child], hear_of: Hear) -> None:
    """After a lost link give the others a moment: what they say may be the cause."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(child.running for child in children) and not any(map(explains, children)):
        collect(children, hear_of)


def explains(child: Child) -> bool:
    """Tell whether a worker failed on its own, not because a neighbour was gone."""
    return child.failure is not None and not child.lost_link


def first_failure(children: list[Child]) -> Exception:
    """Choose the failure that explains the others: one that is not merely a neighbour's lost link."""
    failed = [child for child in children if child.failure is not None]
    chosen = next(filter(explains, failed), failed[0])
    others = [child.stage for child in failed if child is not chosen and child.lost_link]
    note = f"\n(stages {', '.join(map(str, others))} then lost their links)" if others else ""
    return ValueError(f"stage {chosen.stage}: {chosen.failure}{note}")


def end_all(children: list[Child]) -> None:
    """End every worker that is still there; closing its pipe ends it at once."""
    for child in children:
        if child.result is not None:
            child.process.join(END_SECONDS)
    for child in children:
        child.pipe.close()
    for child in children:
        child.process.join(END_SECONDS)
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
