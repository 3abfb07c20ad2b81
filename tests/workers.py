"""Worker processes for tests: forked from a server that has torch and thinwire loaded, used again from case to case.

A job is a function of an importable module and its arguments, one tuple per worker. All workers of a job run at once. A job that fails or
takes too long ends every worker, so that nothing half done reaches the next case; the next job starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from patience import HANG

PRELOAD = ["thinwire.run.trainer", "thinwire.cluster.join", "thinwire.pipeline.worker"]
END_SECONDS = 5.0
GRACE_SECONDS = 3.0
"""How long the other workers of a job may take to say what they know after one has failed."""


@dataclass
class Member:
    """One worker process and the pipe to it."""

    process: Any
    pipe: Connection


class Pool:
    """Run jobs; grow to as many workers as the largest job wants."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.members: list[Member] = []

    def run(self, function: Callable, arguments: Sequence[tuple], timeout: float = HANG) -> list[Any]:
        """Call the function in one worker per tuple; return the results in that order, or fail with every worker's traceback."""
        while len(self.members) < len(arguments):
            self.members.append(self._start())
        busy = self.members[: len(arguments)]
        for member, words in zip(busy, arguments, strict=True):
            member.pipe.send((function, words))
        answers = self._collect([member.pipe for member in busy], timeout)
        problems = [
            f"worker {number}: {answers[number][1] if number in answers else f'no answer within {timeout} s'}"
            for number in range(len(arguments))
            if not (number in answers and answers[number][0])
        ]
        if problems:
            self.close()
            raise AssertionError("\n".join(problems))
        return [answers[number][1] for number in range(len(arguments))]

    def _start(self) -> Member:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return Member(process, ours)

    def _collect(self, pipes: list[Connection], timeout: float) -> dict[int, tuple[bool, Any]]:
        """Return (went well, result or traceback) by worker, of those that answered in time."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(pipes) and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([pipe for number, pipe in enumerate(pipes) if number not in answers], left):
                number = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[number] = pipes[number].recv()
                except (EOFError, OSError):
                    answers[number] = (False, "ended without a word")
                if not answers[number][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def close(self) -> None:
        """End every worker and collect it."""
        members, self.members = self.members, []
        for member in members:
            member.pipe.close()
        for member in members:
            member.process.join(END_SECONDS)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()


def serve(pipe: Connection) -> None:
    """Be a worker: take jobs until the test process closes the pipe or dies, whatever the job under way does."""
    import torch

    torch.set_num_threads(1)
    jobs: queue.Queue = queue.Queue()
    threading.Thread(target=_read, args=(pipe, jobs), daemon=True).start()
    while True:
        function, words = jobs.get()
        try:
            answer = (True, function(*words))
        except BaseException:  # a worker reports whatever ends a job
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _read(pipe: Connection, jobs: queue.Queue) -> None:
    try:
        while True:
            jobs.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)
