"""The process of one worker under a supervisor on this machine: do the task, say what comes of it, end when the supervisor does.

What a worker has to say goes through its own pipe, as JSON; if the supervisor dies the pipe closes, and the worker ends itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from thinwire.cluster.cause import causes, in_a_line, raised_at, trace_of
from thinwire.cluster.membership import Membership
from thinwire.cluster.places import Places
from thinwire.cluster.scratch import worker_name
from thinwire.config.options import CHOSEN
from thinwire.config.toml import from_toml
from thinwire.link.errors import LinkError, ProtocolError
from thinwire.link.identity import load_identity
from thinwire.link.peer import WorkerId
from thinwire.link.roster import read_roster
from thinwire.run.stop import TAKEN, Stop
from thinwire.util.console import closing_console

MESSAGE_BYTES = 2**26
"""Longest message between supervisor and worker."""
BEAT_SECONDS = 1.0
"""Time between a worker's signs of life."""

Say = Callable[[dict[str, Any]], None]
"""How a worker tells the supervisor something, as JSON."""
Task = Callable[..., dict[str, Any]]
"""What every worker does: a module's function of (member, say, stop, **arguments) that returns what it found."""


@dataclass(frozen=True)
class Failure:
    """Why a worker has not done its task."""

    text: str
    kind: str = "lost"
    """`refused`: a new start would meet it again; `protocol`: so, found on a link; `link`: its cause is at another worker; `raised`: an
    exception that nobody expected; `lost`: the process is gone, silent or stuck."""
    trace: str | None = None
    """The traceback of such an exception; the text says it in a line."""
    where: tuple[int, str] | None = None
    """The steps done, and the line of the program, where it was raised."""

    @property
    def of_link(self) -> bool:
        return self.kind in ("link", "protocol")

    @property
    def would_come_again(self) -> bool:
        return self.kind in ("refused", "protocol")


def work(
    pipe: Connection, task: Task, settings: str, registered: str, arguments: str, scratch: str, worker_id: WorkerId, incarnation: int
) -> None:
    """Be one worker: do the task, then report its result or what went wrong."""
    # Signals for the whole process group reach the supervisor too, which asks everyone to stop.
    for number in TAKEN:
        signal.signal(number, signal.SIG_IGN)
    stop, supervisor = Stop(supervised=True), SupervisorPipe(pipe)
    threading.Thread(target=listen_to_supervisor, args=(pipe, stop), daemon=True).start()
    threading.Thread(target=send_signs_of_life, args=(supervisor,), daemon=True).start()
    folder = Path(scratch)
    try:
        for section, classes in json.loads(registered).items():
            CHOSEN[section].adopt(classes)
        member = Membership(
            config=from_toml(settings),
            places=Places(read_roster(folder / "roster.toml"), incarnation=incarnation),
            identity=load_identity(folder / worker_name(worker_id)),
            stage=worker_id.stage,
            replica=worker_id.replica,
            held=True,
        )
        with closing_console(partial(stop.wish, now=True)):
            supervisor.say({"result": task(member, supervisor.say, stop, **json.loads(arguments))})
    except BaseException as error:
        supervisor.say({"failed": str(error)} | described(error, supervisor.step))
        sys.exit(1)


def described(error: BaseException, step: int) -> dict[str, Any]:
    """Describe what ended a worker's task, for the supervisor's `Failure`."""
    if isinstance(error, ValueError):
        return {"kind": "refused"}
    if isinstance(error, LinkError):  # one that was found here would come again; others have their cause elsewhere
        return {"kind": "protocol" if isinstance(error, ProtocolError) else "link"}
    where = [step, raised_at(causes(error)[-1])]
    return {"failed": in_a_line(error), "kind": "raised", "trace": trace_of(error), "where": where}


def failure_in(message: dict[str, Any]) -> Failure:
    """Read what a worker says of its failure."""
    where = tuple(message["where"]) if "where" in message else None
    return Failure(message["failed"], message.get("kind", "lost"), message.get("trace"), where)


class SupervisorPipe:
    """What a worker says to its supervisor; two threads may speak."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.lock = pipe, threading.Lock()
        self.step = 0
        """The steps done, as far as they were told."""

    def say(self, message: dict[str, Any]) -> None:
        self.step = next((message[name] for name in ("step", "restored", "begun") if name in message), self.step)
        try:
            with self.lock:
                write_pipe(self.pipe, message)
        except OSError:  # the supervisor has closed the pipe, or is dead: there is nobody to tell anything
            os._exit(1)


def send_signs_of_life(supervisor: SupervisorPipe) -> None:
    """Give signs of life for as long as the supervisor hears them."""
    while True:
        supervisor.say({"alive": True})
        time.sleep(BEAT_SECONDS)


def listen_to_supervisor(pipe: Connection, stop: Stop) -> None:
    """Wait for a word of the supervisor: a wish to stop, or its end, which is this worker's end too."""
    try:
        while (wish := read_pipe(pipe).get("stop")) is not None:
            stop.wish(now=wish == "now")
    except (EOFError, OSError):
        os._exit(1)


def write_pipe(pipe: Connection, message: dict[str, Any]) -> None:
    """Send a message between supervisor and worker: JSON, never a pickle."""
    pipe.send_bytes(json.dumps(message).encode())


def read_pipe(pipe: Connection) -> dict[str, Any]:
    """Receive such a message."""
    return json.loads(pipe.recv_bytes(MESSAGE_BYTES))
