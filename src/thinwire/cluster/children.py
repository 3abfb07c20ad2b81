"""The worker processes of a supervisor: collect what they say, ask them to stop, end them, choose the failure that explains the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from thinwire.cluster.worker_process import Failure, failure_in, read_pipe, write_pipe
from thinwire.link.peer import WorkerId

GRACE_SECONDS = 10.0
"""How long to wait for the worker whose failure explains a lost link."""
END_SECONDS = 2.0
"""How long a worker may take to end on its own."""

Hear = Callable[[WorkerId, dict[str, Any]], None]
"""What the supervisor does with what a worker says."""


@dataclass
class Child:
    """A worker process and the pipe to it."""

    worker_id: WorkerId
    process: Any
    pipe: Connection
    result: dict | None = None
    failure: Failure | None = None
    ended: bool = False
    """Whether it was lost, or was stuck, when all were asked to end: nobody takes its place."""
    heard_at: float | None = None
    """When it last gave a sign of life; None: it may still be importing torch, which has no limit. If it dies its pipe tells."""

    def __str__(self) -> str:
        return str(self.worker_id) if self.worker_id.replica else f"stage {self.worker_id.stage}"  # most runs have one replica

    @property
    def running(self) -> bool:
        return self.result is None and self.failure is None and not self.ended

    @property
    def explains(self) -> bool:
        """Tell whether it failed on its own, not because a neighbour was gone."""
        return self.failure is not None and self.failure.kind != "link"


def collect(children: Sequence[Child], hear_of: Hear, timeout: float = 0.5) -> None:
    """Take what the workers have to say."""
    open_pipes = {child.pipe: child for child in children if child.running}
    for pipe in wait(list(open_pipes), timeout):
        child = open_pipes[pipe]  # type: ignore[index]
        try:
            message = read_pipe(child.pipe)
        except (EOFError, OSError):
            child.process.join(1)
            child.failure = Failure(f"the worker ended without a word (exit code {child.process.exitcode})")
            continue
        child.heard_at = time.monotonic()
        if "result" in message:
            child.result = message["result"]
        elif "failed" in message:
            child.failure = failure_in(message)
        elif "alive" not in message:
            hear_of(child.worker_id, message)


def ask_to_stop(children: Sequence[Child], wish: str) -> None:
    """Pass the wish on; a worker that has just ended is found out by `collect`."""
    for child in children:
        if child.running:
            with suppress(OSError):
                write_pipe(child.pipe, {"stop": wish})


def linger(children: Sequence[Child], hear_of: Hear) -> None:
    """After a lost link give the others a moment: what they say may be the cause."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(child.running for child in children) and not any(child.explains for child in children):
        collect(children, hear_of)


def first_failure(children: Sequence[Child], again: bool = False) -> ValueError:
    """Choose the failure that explains the others: one that is not merely a neighbour's lost link; its traceback's last line comes last."""
    failed = [child for child in children if child.failure is not None]
    chosen = next((child for child in failed if child.explains), failed[0])
    others = [str(child) for child in failed if child is not chosen and not child.explains]
    note = f"\n({', '.join(others)} then lost {'its' if len(others) == 1 else 'their'} links)" if others else ""
    assert chosen.failure is not None
    if chosen.failure.trace is None:
        return ValueError(f"{chosen}: {chosen.failure.text}{note}")
    twice = " twice in the same step, so another start would not help" if again else ""
    return ValueError(f"{chosen} failed{twice}:{note}\n{chosen.failure.trace}")


def end_all(children: Sequence[Child]) -> None:
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
