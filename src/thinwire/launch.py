"""Start one worker process per stage on this machine, watch them, and leave none behind: `thinwire train --pipeline.mode workers`.

The workers talk over real links on the loopback address, with identities made for this run and forgotten after it. What a worker has to
say reaches this process through its own pipe; if this process dies, the pipe closes and the workers end themselves.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from thinwire.configfile import from_toml, to_toml
from thinwire.link.roster import Place, Roster, Worker, read_roster, write_roster
from thinwire.link.tls import load_identity, make_identity
from thinwire.settings import TrainCommand
from thinwire.track import Tracker
from thinwire.view import RunView

GRACE_SECONDS = 10.0
"""How long workers may take to end after one of them has failed."""
STOP_SECONDS = 60.0
"""How long workers may take to finish their step after a wish to stop."""


@dataclass
class Child:
    """A worker process and the pipe to it."""

    stage: int
    process: Any
    pipe: Connection
    result: dict | None = None
    failure: str | None = None


def launch(command: TrainCommand) -> dict:
    """Train with one process per stage; return the run's summary."""
    with tempfile.TemporaryDirectory(prefix="thinwire-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        make_local_roster(folder, command.config.pipeline.stages)
        context = forkserver()
        children = [start(context, command, folder, stage) for stage in range(command.config.pipeline.stages)]
        stack.callback(end_all, children)
        view = stack.enter_context(RunView(command.config))
        return watch(children, view)


def forkserver() -> ForkServerContext:
    """Return a context whose processes are forked from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.train", "thinwire.pipeline.worker"])
    return context


def make_local_roster(folder: Path, stages: int) -> None:
    """Make identities and a roster for workers on this machine; each listens on a free port of the loopback address."""
    workers = []
    for stage, port in enumerate(free_ports(stages)):
        identity = make_identity(folder / f"stage-{stage}", f"stage-{stage}", days=30)
        workers.append(Worker(Place(0, stage), identity.certificate, f"127.0.0.1:{port}"))
    write_roster(folder / "roster.toml", Roster.of(workers))


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start(context: ForkServerContext, command: TrainCommand, folder: Path, stage: int) -> Child:
    """Start the worker of a stage."""
    ours, theirs = context.Pipe()
    arguments = (theirs, to_toml(command.config), str(folder), str(command.run), command.resume, stage)
    process = context.Process(target=work, args=arguments, name=f"thinwire-stage-{stage}", daemon=True)
    process.start()
    theirs.close()
    return Child(stage, process, ours)


def work(pipe: Connection, settings: str, scratch: str, run: str, resume: bool, stage: int) -> None:
    """Be the worker of a stage: train, then report the summary or what went wrong."""
    from thinwire.join import train_stage

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, which asks everyone to stop
    threading.Thread(target=end_with_supervisor, args=(pipe,), daemon=True).start()
    folder = Path(scratch)
    try:
        identity = load_identity(folder / f"stage-{stage}")
        roster = read_roster(folder / "roster.toml")
        summary = train_stage(
            from_toml(settings), roster, identity, stage, Path(run), resume=resume, trackers=[PipeTracker(pipe)], threads=1
        )
        pipe.send({"summary": summary})
    except ValueError as error:
        pipe.send({"refused": str(error)})
        sys.exit(1)
    except BaseException:
        pipe.send({"failed": traceback.format_exc()})
        sys.exit(1)


class PipeTracker(Tracker):
    """Tell the supervisor about every step."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.pipe.send({"step": step, "values": dict(values)})


def end_with_supervisor(pipe: Connection) -> None:
    """Wait for a word of the supervisor: a wish to stop, or its end."""
    import os

    try:
        while pipe.recv() == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
    except (EOFError, OSError):
        os._exit(1)


def watch(children: list[Child], view: RunView) -> dict:
    """Wait for all workers; pass on a wish to stop; raise what the first failure said."""
    asked_at: float | None = None
    while any(child.result is None and child.failure is None for child in children):
        try:
            collect(children, view)
        except KeyboardInterrupt:
            if asked_at is not None:
                raise
            asked_at = time.monotonic()
            ask_to_stop(children)
        failed = [child for child in children if child.failure is not None]
        if failed:
            linger(children, view)
            raise first_failure(children)
        if asked_at is not None and time.monotonic() - asked_at > STOP_SECONDS:
            raise ValueError(
                f"the workers did not finish their step within {STOP_SECONDS:.0f} s; they were ended, the last checkpoint is intact"
            )
    summary = children[0].result
    assert summary is not None
    return summary


def collect(children: list[Child], view: RunView, timeout: float = 0.5) -> None:
    """Take what the workers have to say."""
    open_pipes = {child.pipe: child for child in children if child.result is None and child.failure is None}
    for pipe in wait(list(open_pipes), timeout):
        child = open_pipes[pipe]  # type: ignore[index]
        try:
            message = child.pipe.recv()
        except (EOFError, OSError):
            child.process.join(1)
            child.failure = f"the worker ended without a word (exit code {child.process.exitcode})"
            continue
        if "step" in message:
            view.log(child.stage, message["step"], message["values"])
        elif "summary" in message:
            child.result = message["summary"]
        else:
            child.failure = message.get("refused") or message["failed"]


def ask_to_stop(children: list[Child]) -> None:
    for child in children:
        if child.result is None and child.failure is None:
            child.pipe.send("stop")


def linger(children: list[Child], view: RunView) -> None:
    """After a failure give the others a moment: what they say may be the cause."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(child.result is None and child.failure is None for child in children):
        collect(children, view)


def first_failure(children: list[Child]) -> Exception:
    """Choose the failure that explains the others: one that is not merely a neighbour's lost link."""
    failed = [child for child in children if child.failure is not None]
    chosen = next((child for child in failed if "LinkError" not in child.failure and "LinkClosed" not in child.failure), failed[0])  # type: ignore[operator]
    others = [child.stage for child in failed if child is not chosen]
    note = f"\n(stages {', '.join(map(str, others))} then lost their links)" if others else ""
    return ValueError(f"stage {chosen.stage}: {chosen.failure}{note}")


def end_all(children: list[Child]) -> None:
    """End every worker that is still there."""
    for child in children:
        child.pipe.close()
        if child.process.is_alive():
            child.process.join(0.2 if child.failure else 2.0)
    for child in children:
        if child.process.is_alive():
            child.process.terminate()
            child.process.join(2.0)
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
