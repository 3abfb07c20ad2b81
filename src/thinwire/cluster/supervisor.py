"""Worker processes on this machine, one per stage and replica: start them for a task, watch them, and leave none behind.

The workers talk over real links on the loopback address, with identities made for this run and forgotten after it. What a worker does in
its process is in `worker_process.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cluster.children import Child, Hear, ask_to_stop, collect, end_all, first_failure, linger
from thinwire.cluster.scratch import held_ports, make_local_roster, scratch_folder, worker_name
from thinwire.cluster.worker_process import Failure, Task, work
from thinwire.config.options import CHOSEN
from thinwire.config.sections import RunConfig
from thinwire.config.toml import to_toml
from thinwire.link.peer import WorkerId
from thinwire.run.stop import Stop
from thinwire.util.console import interrupts_ignored
from thinwire.util.notices import say_aloud, warn

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext  # Windows has only the second


STOP_SILENT_SECONDS = 10.0
"""A worker that was asked to end at once may give no sign of life for this long at most."""
AWAY_SECONDS = 3.0
"""A supervisor that looks after its workers less often than this was stopped itself."""
RESTARTS = 5
"""Workers that may be lost in a row without any progress between."""
BACKOFF_SECONDS = 0.1
"""First pause before a lost worker is started again; doubles while there is no progress."""


class Supervisor:
    """One process per worker id that do a task together; a lost one is replaced where the task knows how to go on."""

    def __init__(
        self, task: Task, config: RunConfig, arguments: dict[str, Any], folder: Path, hear_of: Hear, replacing: dict[str, Any] | None
    ) -> None:
        self.task, self.config, self.arguments, self.folder = task, config, arguments, folder
        self.hear_of, self.replacing = hear_of, replacing
        self.context = process_context()
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
        """Start the process of a worker."""
        ours, theirs = self.context.Pipe()
        self.incarnation += 1  # it grows even if the clock goes back
        arguments = json.dumps(self.arguments | (more or {}))
        registered = json.dumps({section: registry.importable() for section, registry in CHOSEN.items()})
        given = (theirs, self.task, to_toml(self.config), registered, arguments, str(self.folder), worker_id, self.incarnation)
        process = self.context.Process(target=work, args=given, name=f"thinwire-{worker_name(worker_id)}", daemon=True)
        anew = self.context.get_start_method() != "forkserver"
        with interrupts_ignored() if anew else nullcontext():
            process.start()
        theirs.close()
        return Child(worker_id, process, ours, heard_at=None if anew else time.monotonic())

    def watch(self, stop: Stop) -> list[dict[str, Any]]:
        """Wait for all workers; replace lost ones, pass on a wish to stop; raise what the first failure said."""
        while any(child.running for child in self.children):
            collect(self.children, self._hear)
            self._end_silent()
            self._pass_on("now" if stop.now else "soon" if stop.asked else None)
            for child in self.children:
                if child.failure is not None:
                    self._act_on(child, child.failure)
        return [child.result for child in self.children if child.result is not None]

    def _pass_on(self, wish: str | None) -> None:
        """Ask everyone to stop, once for each wish."""
        if wish is None or wish == self.wish:
            return
        self.wish = wish
        ask_to_stop(self.children, wish)
        if wish == "now":
            for child in self.children:
                child.heard_at = child.heard_at or time.monotonic()

    def _act_on(self, child: Child, failure: Failure) -> None:
        """Replace a lost worker, do without it, or raise why nothing helps."""
        if self.wish == "now" and (failure.of_link or not failure.would_come_again):  # others may have ended before it heard of the wish
            self._let_go(child, failure)
        else:
            self._replace_or_raise(child, failure)

    def _let_go(self, child: Child, failure: Failure) -> None:
        """Do without a worker that was lost when all were asked to end: the others end, and its last checkpoint stands."""
        text = f"{child} did not end by itself ({failure.text}); a resume goes on from the last checkpoint that all have"
        warn(text)
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
                child.heard_at = now if child.heard_at is not None else None
        self.looked_at = now
        for child in self.children:
            if child.running and child.heard_at is not None and now - child.heard_at > limit and not child.pipe.poll():
                child.failure = Failure(f"no sign of life for {limit} s")

    def _replace_or_raise(self, child: Child, failure: Failure) -> None:
        """Start a lost worker again, unless that would not help."""
        others = [other for other in self.children if other is not child]
        again = failure.where is not None and (child.worker_id, failure.where) in self.raised
        if failure.kind in ("refused", "protocol", "link") or self.replacing is None or self.lost >= RESTARTS or again:
            linger(self.children, self._hear)
            raise first_failure(self.children, again)
        if failure.where is not None:
            self.raised.add((child.worker_id, failure.where))
        child.process.kill()
        end_all([child])
        if others and all(other.result is not None for other in others):
            child.failure, child.result = None, others[0].result  # all was said and written: only its own last word is missing
            return
        self.hear_of(child.worker_id, {"lost": failure.text})
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
    """Let one process per worker id do a task; return what each of them returned.

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


def process_context() -> ForkServerContext | SpawnContext:
    """Return a context for worker processes: forked from one that has imported torch already, or begun anew where that is not to be had."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing.forkserver import ensure_running  # not everywhere

    context = multiprocessing.get_context("forkserver")
    # torch's pipeline engine with the rest, once for all workers; where torch is another, what fails to import is passed over
    context.set_forkserver_preload(["thinwire.run.trainer", "thinwire.pipeline.worker", "thinwire.pipeline.torch_engine"])
    # A terminal's Ctrl-C reaches every process. Started like this, the server and the workers ignore it from their first moment on;
    # the supervisor's wish to stop comes through their pipes.
    with interrupts_ignored():
        ensure_running()
    return context


def grid(config: RunConfig) -> list[WorkerId]:
    """List the worker ids of a run, replica by replica."""
    return [WorkerId(replica, stage) for replica in range(config.replicas.count) for stage in range(config.pipeline.stages)]
