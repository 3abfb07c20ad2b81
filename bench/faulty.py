"""Shared by the benches of recovery: a small training in workers that can be harmed from outside, and what they said and when."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.append(str(TESTS))  # the faults are those of the tests

from faults.inject import order, train_with  # noqa: E402
from faults.support import process_figures  # noqa: E402
from link.support import World, pair  # noqa: E402
from runs import write_config  # noqa: E402
from thinwire.link.frame import Channel, Frame, Kind  # noqa: E402

STAGES = 4
MODEL = ("--model.width", "64", "--model.ffn", "128", "--model.context", "32", "--train.batch", "8", "--pipeline.microbatches", "4")
WORDS = ("--pipeline.stages", str(STAGES), "--train.threads", "1", "--train.validate_every", "0", "--train.checkpoint_every", "1", *MODEL)


@dataclass
class Watched:
    """A run in progress, seen from its supervisor; every message has the time at which it was heard."""

    folder: Path
    pids: dict[int, int] = field(default_factory=dict)
    messages: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    """When stage 0 told of which step."""
    orders: int = 0
    began: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)

    def hear(self, stage: int, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if "pid" in message:
            self.pids[stage] = message["pid"]
        if "step" not in message:
            self.messages.append((now, stage, message))
        elif stage == 0:
            self.steps.append((now, message["step"]))

    @property
    def best(self) -> int:
        return max((step for _, step in self.steps), default=0)

    def wait_for(self, steps: int) -> None:
        """Wait until so many more steps are done."""
        wanted = self.best + steps
        while self.best < wanted and not self.over.is_set():
            time.sleep(0.005)

    def kill(self, stage: int) -> float:
        """Kill a worker; return when."""
        now = time.monotonic()
        os.kill(self.pids[stage], signal.SIGKILL)
        return now

    def order(self, stage: int, action: str, amount: float = 0.0) -> float:
        """Let a worker do something to itself; return when."""
        self.orders += 1
        order(self.folder / "struck", stage, self.orders, action, amount)
        return time.monotonic()

    def first(self, word: str, after: float, stage: int | None = None) -> float | None:
        """Return when a message with this word was first heard after a moment."""
        times = [at for at, who, message in self.messages if at > after and word in message and stage in (None, who)]
        return min(times, default=None)

    def step_after(self, after: float) -> float | None:
        """Return when the first step was told after a moment."""
        return next((at for at, _ in self.steps if at > after), None)

    def longest_gap(self, at: float, steps: int = 3) -> float:
        """Return the longest time between two steps among the one under way at a moment and those after it."""
        gaps = list(itertools.pairwise(when for when, _ in self.steps))
        number = next(number for number, (_, end) in enumerate(gaps) if end > at)
        return max(end - start for start, end in gaps[number : number + steps])

    def usual_gap(self) -> float:
        """Return the median time between two steps."""
        times = [at for at, _ in self.steps]
        return statistics.median(late - early for early, late in itertools.pairwise(times))

    def memory(self) -> dict[int, int]:
        """Return the resident KB of the supervisor and every worker, by process."""
        found = {}
        for pid in (os.getpid(), *self.pids.values()):
            try:
                found[pid] = process_figures(pid)["resident"]
            except (FileNotFoundError, ProcessLookupError, KeyError):
                continue
        return found


def run(folder: Path, steps: int, harm: Any = None, *words: str) -> tuple[Watched, dict[str, Any], float]:
    """Train; `harm(watched)` runs beside it in a thread. Return what was seen, the summary, and the seconds from the first step on."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = write_config(folder, folder.parent / "cache")
    watched = Watched(folder)
    thread = threading.Thread(target=harm, args=(watched,), daemon=True) if harm else None
    if thread:
        thread.start()
    command = ["--config", settings, "--run", str(folder / "run"), "--train.steps", str(steps), *WORDS, *words]
    summary = train_with(command, [], folder / "struck", hear=watched.hear)
    watched.over.set()
    if thread:
        thread.join()
    return watched, summary, watched.steps[-1][0] - watched.steps[0][0]


def reset_gaps(folder: Path, count: int, every: float = 0.002) -> list[float]:
    """Send small frames over one link all the time and reset it; return the longest time without a frame after each reset."""
    gaps = []
    with pair(World(folder)) as (left, right, _):
        left.wait_open(10)
        for number in range(count):
            arrivals: list[float] = []
            for sent in range(300):
                left.send(Frame.make(Kind.STEP, b"x"), 10)
                if sent == 50:
                    (left if number % 2 else right).reset_connection()
                time.sleep(every)
                while right.held(Channel.CONTROL)[0]:
                    right.receive(Channel.CONTROL, 10)
                    arrivals.append(time.monotonic())
            gaps.append(max(late - early for early, late in itertools.pairwise(arrivals)))
    return gaps
