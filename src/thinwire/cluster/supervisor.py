"""Worker processes on this machine, one per stage and replica: start them for a task, watch them, and leave none behind.

The workers talk over real links on the loopback address, with identities made for this run and forgotten after it. What a worker has to
say reaches this process through its own pipe; if this process dies, the pipe closes and the workers end themselves.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from thinwire.cluster.cause import causes, in_a_line, place_of, trace_of
from thinwire.cluster.membership import Membership
from thinwire.cluster.scratch import held_ports, make_local_roster, scratch_folder, worker_name
from thinwire.config.sections import RunConfig
from thinwire.config.toml import from_toml, to_toml
from thinwire.link.errors import LinkError, ProtocolError
from thinwire.link.identity import load_identity
from thinwire.link.peer import WorkerId
from thinwire.link.roster import read_roster
from thinwire.run.stop import Stop

GRACE_SECONDS = 10.0
"""How long to wait for the worker whose failure explains a lost link."""
END_SECONDS = 2.0
"""How long a worker may take to end on its own."""
STOP_SILENT_SECONDS = 10.0
"""A worker that was asked to end at once may give no sign of life for this long at most."""
MESSAGE_BYTES = 2**26
"""Longest message between supervisor and worker."""
BEAT_SECONDS = 1.0
"""Time between a worker's signs of life."""
AWAY_SECONDS = 3.0
"""A supervisor that looks after its workers less often than this was stopped itself."""
RESTARTS = 5
"""Workers that may be lost in a row without any progress between."""
BACKOFF_SECONDS = 0.1
"""First pause before a lost worker is started again; doubles while there is no progress."""

Say = Callable[[dict[str, Any]], None]
"""How a worker tells the supervisor something, as JSON."""
Task = Callable[..., dict[str, Any]]
"""What every worker does: a module's function of (member, say, stop, **arguments) that returns what it found."""
Hear = Callable[[WorkerId, dict[str, Any]], None]
"""What the supervisor does with what the worker at a place says."""


@dataclass
class Child:
    """A worker process and the pipe to it."""

    worker_id: WorkerId
    process: Any
    pipe: Connection
    result: dict | None = None
    failure: str | None = None
    lost_link: bool = False
    """Whether the failure is that of a link, which has its cause elsewhere."""
    of_link: bool = False
    """Whether the failure is that of a link at all."""
    refused: bool = False
    """Whether the failure is one that a new start would meet again."""
    trace: str | None = None
    """The traceback of an exception that nobody expected; `failure` says it in a line."""
    where: tuple[int, str] | None = None
    """The steps done, and the place in the program, where it was raised."""
    ended: bool = False
    """Whether it was lost, or was stuck, when all were asked to end: nobody takes its place."""
    heard_at: float = field(default_factory=time.monotonic)
    """When it last gave a sign of life."""

    @property
    def running(self) -> bool:
        return self.result is None and self.failure is None and not self.ended


class Supervisor:
    """One process per place that do a task together; a lost one is replaced where the task knows how to go on."""

    def __init__(
        self, task: Task, config: RunConfig, arguments: dict[str, Any], folder: Path, hear_of: Hear, replacing: dict[str, Any] | None
    ) -> None:
        self.task, self.config, self.arguments, self.folder = task, config, arguments, folder
        self.hear_of, self.replacing = hear_of, replacing
        self.context = forkserver()
        self.children: list[Child] = []
        self.incarnation = time.time_ns() // 1000
        self.best = self.lost = 0
        """The furthest step so far, and the workers lost since."""
        self.looked_at = time.monotonic()
        self.wish: str | None = None
        """When everyone was asked to stop: `soon`, after the step under way, or `now`."""
        self.raised: set[tuple[WorkerId, tuple[int, str]]] = set()
        """Where workers have raised exceptions so far."""

    def start(self, worker_id: WorkerId, more: dict[str, Any] | None = None) -> Child:
        """Start the worker at a place."""
        ours, theirs = self.context.Pipe()
        self.incarnation += 1  # it grows even if the clock goes back
        arguments = json.dumps(self.arguments | (more or {}))
        given = (theirs, self.task, to_toml(self.config), arguments, str(self.folder), worker_id, self.incarnation)
        process = self.context.Process(target=work, args=given, name=f"thinwire-{worker_name(worker_id)}", daemon=True)
        process.start()
        theirs.close()
        return Child(worker_id, process, ours)

    def watch(self, stop: Stop) -> list[dict[str, Any]]:
        """Wait for all workers; replace lost ones, pass on a wish to stop; raise what the first failure said."""
        while any(child.running for child in self.children):
            collect(self.children, self._hear)
            self._end_silent()
            self._pass_on("now" if stop.now else "soon" if stop.asked else None)
            for child in [child for child in self.children if child.failure is not None]:
                if self.wish == "now" and (child.of_link or not child.refused):  # others may have ended before it heard of the wish
                    self._let_go(child)
                else:
                    self._replace_or_raise(child)
        return [child.result for child in self.children if child.result is not None]

    def _pass_on(self, wish: str | None) -> None:
        """Ask everyone to stop, once for each wish."""
        if wish is None or wish == self.wish:
            return
        self.wish = wish
        ask_to_stop(self.children, wish)

    def _let_go(self, child: Child) -> None:
        """Do without a worker that was lost when all were asked to end: the others end, and its last checkpoint stands."""
        text = f"{called(child.worker_id)} did not end by itself ({child.failure}); a resume goes on from the last checkpoint that all have"
        print(f"thinwire: warning: {text}", file=sys.stderr, flush=True)
        child.failure, child.ended = None, True
        child.process.kill()
        end_all([child])

    def _hear(self, worker_id: WorkerId, message: dict[str, Any]) -> None:
        if message.get("step", 0) > self.best:
            self.best, self.lost = message["step"], 0
        self.hear_of(worker_id, message)

    def _end_silent(self) -> None:
        """End a worker that gives no sign of life: one that is stopped, or stuck, holds up everyone."""
        limit, now = self.config.link.silent_seconds, time.monotonic()
        if self.wish == "now":
            limit = min(limit, STOP_SILENT_SECONDS)
        if now - self.looked_at > AWAY_SECONDS:  # this process itself was stopped: what the workers said meanwhile is still to be read
            for child in self.children:
                child.heard_at = now
        self.looked_at = now
        for child in self.children:
            if child.running and now - child.heard_at > limit and not child.pipe.poll():
                child.failure = f"no sign of life for {limit} s"

    def _replace_or_raise(self, child: Child) -> None:
        """Start a lost worker again, unless that would not help."""
        others = [other for other in self.children if other is not child]
        again = child.where is not None and (child.worker_id, child.where) in self.raised
        if child.refused or child.lost_link or self.replacing is None or self.lost >= RESTARTS or again:
            linger(self.children, self._hear)
            raise first_failure(self.children, again)
        if child.where is not None:
            self.raised.add((child.worker_id, child.where))
        child.process.kill()
        end_all([child])
        if others and all(other.result is not None for other in others):
            child.failure, child.result = None, others[0].result  # all was said and written: only its own last word is missing
            return
        self.hear_of(child.worker_id, {"lost": child.failure})
        time.sleep(BACKOFF_SECONDS * (2**self.lost - 1))
        self.lost += 1
        fresh = self.start(child.worker_id, self.replacing)
        self.children[self.children.index(child)] = fresh
        if self.wish is not None:
            ask_to_stop([fresh], self.wish)


def run_workers(
    task: Task,
    config: RunConfig,
    arguments: dict[str, Any],
    hear_of: Hear,
    *,
    graceful: bool = True,
    replacing: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Let one process per place do a task; return what each of them returned.

    A task that is not `graceful` ends at the first Ctrl-C. `replacing` are further arguments for a process that takes the place of a
    lost one; without them the loss of a worker ends the task.
    """
    stop, worker_ids = Stop(), grid(config)
    stop.tell = say_aloud
    with ExitStack() as stack:
        if graceful:
            stack.enter_context(stop.listening())  # first: a signal must not leave the folder behind
        scratch = stack.enter_context(scratch_folder())
        make_local_roster(scratch, worker_ids, stack.enter_context(held_ports(len(worker_ids))))
        supervisor = Supervisor(task, config, arguments, scratch, hear_of, replacing)
        stack.callback(end_all, supervisor.children)
        for worker_id in worker_ids:
            supervisor.children.append(supervisor.start(worker_id))
        return supervisor.watch(stop)


def say_aloud(text: str) -> None:
    """Tell the person at this machine."""
    print(text, file=sys.stderr, flush=True)


def forkserver() -> ForkServerContext:
    """Return a context whose processes are forked from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.run.trainer", "thinwire.pipeline.worker"])
    # A terminal's Ctrl-C reaches every process. Started like this, the server and the workers ignore it from their first moment on;
    # the supervisor's wish to stop comes through their pipes.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    return context


def grid(config: RunConfig) -> list[WorkerId]:
    """List the places of a run, replica by replica."""
    return [WorkerId(replica, stage) for replica in range(config.replicas.count) for stage in range(config.pipeline.stages)]


def work(pipe: Connection, task: Task, settings: str, arguments: str, scratch: str, worker_id: WorkerId, incarnation: int) -> None:
    """Be the worker at a place: do the task, then report its result or what went wrong."""
    # Signals for the whole process group reach the supervisor too, which asks everyone to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop, voice = Stop(supervised=True), Voice(pipe)
    threading.Thread(target=heed, args=(pipe, stop), daemon=True).start()
    threading.Thread(target=beat, args=(voice,), daemon=True).start()
    folder = Path(scratch)
    try:
        identity, roster = load_identity(folder / worker_name(worker_id)), read_roster(folder / "roster.toml")
        member = Membership(
            config=from_toml(settings),
            roster=roster,
            identity=identity,
            stage=worker_id.stage,
            replica=worker_id.replica,
            incarnation=incarnation,
            held=True,
        )
        voice.say({"result": task(member, voice.say, stop, **json.loads(arguments))})
    except ValueError as error:
        voice.say({"refused": str(error)})
        sys.exit(1)
    except LinkError as error:
        cause = isinstance(error, ProtocolError)  # found here; other link errors have their cause elsewhere
        voice.say({"refused" if cause else "failed": str(error), "lost_link": not cause, "of_link": True})
        sys.exit(1)
    except BaseException as error:
        voice.say({"failed": in_a_line(error), "trace": trace_of(error), "where": [voice.step, place_of(causes(error)[-1])]})
        sys.exit(1)


class Voice:
    """What a worker says to its supervisor; two threads may speak."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.lock = pipe, threading.Lock()
        self.step = 0
        """The steps done, as far as they were told."""

    def say(self, message: dict[str, Any]) -> None:
        self.step = next((message[name] for name in ("step", "restored", "begun") if name in message), self.step)
        try:
            with self.lock:
                say(self.pipe, message)
        except OSError:  # the supervisor has closed the pipe, or is dead: there is nobody to tell anything
            os._exit(1)


def beat(voice: Voice) -> None:
    """Give signs of life for as long as the supervisor hears them."""
    while True:
        voice.say({"alive": True})
        time.sleep(BEAT_SECONDS)


def say(pipe: Connection, message: dict[str, Any]) -> None:
    """Send a message between supervisor and worker: JSON, never a pickle."""
    pipe.send_bytes(json.dumps(message).encode())


def hear(pipe: Connection) -> dict[str, Any]:
    """Receive a message."""
    return json.loads(pipe.recv_bytes(MESSAGE_BYTES))


def heed(pipe: Connection, stop: Stop) -> None:
    """Wait for a word of the supervisor: a wish to stop, or its end, which is this worker's end too."""
    try:
        while (wish := hear(pipe).get("stop")) is not None:
            stop.wish(now=wish == "now")
    except (EOFError, OSError):
        os._exit(1)


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
        child.heard_at = time.monotonic()
        if "alive" in message:
            continue
        if "result" in message:
            child.result = message["result"]
        elif "refused" in message or "failed" in message:
            child.failure = message.get("refused") or message["failed"]
            child.lost_link, child.refused = message.get("lost_link", False), "refused" in message
            child.of_link, child.trace = message.get("of_link", False), message.get("trace")
            child.where = tuple(message["where"]) if "where" in message else None
        else:
            hear_of(child.worker_id, message)


def ask_to_stop(children: list[Child], wish: str) -> None:
    """Pass the wish on; a worker that has just ended is found out by `collect`."""
    for child in children:
        if child.running:
            with suppress(OSError):
                say(child.pipe, {"stop": wish})


def linger(children: list[Child], hear_of: Hear) -> None:
    """After a lost link give the others a moment: what they say may be the cause."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(child.running for child in children) and not any(map(explains, children)):
        collect(children, hear_of)


def explains(child: Child) -> bool:
    """Tell whether a worker failed on its own, not because a neighbour was gone."""
    return child.failure is not None and not child.lost_link


def first_failure(children: list[Child], again: bool = False) -> Exception:
    """Choose the failure that explains the others: one that is not merely a neighbour's lost link; its traceback's last line comes last."""
    failed = [child for child in children if child.failure is not None]
    chosen = next(filter(explains, failed), failed[0])
    others = [called(child.worker_id) for child in failed if child is not chosen and child.lost_link]
    note = f"\n({', '.join(others)} then lost {'its' if len(others) == 1 else 'their'} links)" if others else ""
    if chosen.trace is None:
        return ValueError(f"{called(chosen.worker_id)}: {chosen.failure}{note}")
    twice = " twice in the same step, so another start would not help" if again else ""
    return ValueError(f"{called(chosen.worker_id)} failed{twice}:{note}\n{chosen.trace}")


def called(worker_id: WorkerId) -> str:
    """Name a worker for people: most runs have one replica."""
    return str(worker_id) if worker_id.replica else f"stage {worker_id.stage}"


def end_all(children: list[Child]) -> None:
    """End every worker that is still there; closing its pipe ends it at once."""
    for child in children:
        if child.result is not None:
            child.process.join(END_SECONDS)
    for child in children:
        child.pipe.close()
    deadline = time.monotonic() + END_SECONDS
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
