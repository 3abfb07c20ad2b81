"""Run many threads of many machines one at a time, with a clock of their own: the same seed, the same order.

Every thread of the simulation is a real one, so production code stays as it is; but only the holder of the baton runs. It hands the baton
on whenever it waits (for a condition, an event, another thread, the network, time), and who gets it next is drawn from the seed. When all
wait, the clock jumps to whatever comes first.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NoReturn

from thinwire.util.runtime import Runtime

MOST_TURNS = 60_000
"""Turns after which a run that does not end is going round in circles."""


class Crash(BaseException):
    """The machine on which this thread ran is gone."""


class Stuck(AssertionError):
    """Nobody can go on any more, or nobody gets anywhere."""


class Task:
    """One thread, and what it waits for."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.waits = 0
        """How often it has waited: a time-out of an earlier wait does not end this one."""
        self.waiting = False
        self.timed_out = False
        self.queue: Queue | None = None
        self.ended: Queue | None = None


class Pool:
    """Real threads, which serve one task after the other: to start one takes longer than most tasks."""

    def __init__(self) -> None:
        self._idle: list[tuple[threading.Lock, list[Callable[[], None]]]] = []

    def run(self, call: Callable[[], None]) -> None:
        """Have a thread make a call."""
        if self._idle:
            woken, calls = self._idle.pop()
            calls.append(call)
            woken.release()
            return
        woken, calls = threading.Lock(), [call]
        threading.Thread(target=self._serve, args=(woken, calls), daemon=True).start()

    def _serve(self, woken: threading.Lock, calls: list[Callable[[], None]]) -> None:
        woken.acquire()
        while True:
            calls.pop()()
            self._idle.append((woken, calls))
            woken.acquire()


class Queue:
    """Tasks that wait for the same thing, the first first."""

    def __init__(self, world: World) -> None:
        self.world, self.tasks = world, deque[Task]()

    def wait(self, seconds: float | None) -> bool:
        """Wait until `wake`; return False after so many seconds of the world's clock."""
        return self.world.wait(self, seconds)

    def wake(self) -> None:
        """Let all go on."""
        while self.tasks:
            self.world.make_ready(self.tasks.popleft())


class World:
    """The clock, the order of turns, and what has happened so far."""

    def __init__(self, seed: int, pool: Pool | None = None) -> None:
        self.seed, self.random, self.now, self.pool = seed, random.Random(seed), 0.0, pool or Pool()
        self.trace: list[str] = []
        self.ready: list[Task] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.tasks: dict[Task, None] = {}
        """In the order in which they began: a set's would differ from run to run."""
        self.turns = 0
        self.failure: str | None = None
        self._numbers = count()
        self._current: Task | None = None
        self._over = threading.Lock()

    def note(self, who: object, text: str) -> None:
        """Write a line of the trace."""
        self.trace.append(f"{self.now:9.4f} {who}: {text}")

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen so many seconds from now, while everybody waits."""
        self.when(self.now + seconds, event)

    def when(self, at: float, event: Callable[[], None]) -> None:
        """Let something happen at a time; what is to happen at the same time happens in this order."""
        heapq.heappush(self.events, (at, next(self._numbers), event))

    def spawn(self, task: Task, target: Callable[[], None]) -> None:
        """Begin a thread; it runs when its turn comes."""

        def run() -> None:
            task.baton.acquire()
            try:
                if not task.machine.gone:
                    target()
            except Crash:
                pass
            except BaseException as error:  # a thread of the product died of what nobody caught: that is a finding
                self.fail(f"{task.name} died: {type(error).__name__}: {error}")
            finally:
                del self.tasks[task]
                if task.ended is not None:
                    task.ended.wake()
                self._hand_on()

        self.tasks[task] = None
        self.ready.append(task)
        self.pool.run(run)

    def run(self) -> None:
        """Let all run until the last thread has ended."""
        self._over.acquire()
        self._hand_on()
        self._over.acquire()
        if self.failure is not None:
            raise Stuck(self.failure)

    def wait(self, queue: Queue | None, seconds: float | None) -> bool:
        """Let others run until the current task is woken; return False if that takes longer."""
        task = self._current
        assert task is not None
        if task.machine.gone:
            raise Crash
        task.waits, task.waiting, task.timed_out, task.queue = task.waits + 1, True, False, queue
        if queue is not None:
            queue.tasks.append(task)
        if seconds is not None:
            number = task.waits
            self.at(max(0.0, seconds), lambda: self._time_out(task, number))
        self._hand_on()
        task.baton.acquire()
        if task.machine.gone:
            raise Crash
        return not task.timed_out

    def _time_out(self, task: Task, number: int) -> None:
        if task.waiting and task.waits == number:
            task.timed_out = True
            if task.queue is not None and task in task.queue.tasks:
                task.queue.tasks.remove(task)
            self.make_ready(task)

    def make_ready(self, task: Task) -> None:
        """Give a task that waits its turn, as soon as its machine runs."""
        if task.waiting:
            task.waiting, task.queue = False, None
            (task.machine.frozen if task.machine.paused else self.ready).append(task)

    def fail(self, why: str) -> None:
        """End the world because of a finding."""
        self.failure = self.failure or why
        self.note("world", f"FAILED: {why}")
        for task in list(self.tasks):
            task.machine.crash()

    def _hand_on(self) -> None:
        """Choose who runs next; the caller stops until it is chosen again."""
        self.turns += 1
        if self.turns > MOST_TURNS and self.failure is None:
            self.fail(f"no end after {MOST_TURNS} turns")
        while not self.ready and self.tasks:
            if not self.events:
                self.fail("deadlock: everybody waits, and nothing is to come")
                continue
            self.now, _, event = heapq.heappop(self.events)
            self._current = None
            event()
        if not self.ready:
            self._over.release()
            return
        place = int(self.random.random() * len(self.ready))
        self.ready[place], self.ready[-1] = self.ready[-1], self.ready[place]
        self._current = task = self.ready.pop()
        task.baton.release()


class Machine(Runtime):
    """One machine: its clock, which is not quite right, its threads, and whether it is there."""

    def __init__(self, world: World, name: str, *, offset: float = 0.0, rate: float = 1.0) -> None:
        self.world, self.name, self.offset, self.rate = world, name, offset, rate
        self.gone = False
        self.ended_at = float("inf")
        self.paused = False
        self.lasting: list[Thread] = []
        """Threads that a process waits for at its end."""
        self.lost: Callable[[], None] = lambda: None
        """Called when the process ends: its connections end too."""
        self.frozen: list[Task] = []
        """Tasks whose turn comes when the machine runs again."""

    def now(self) -> float:
        return self.offset + self.world.now * self.rate

    def sleep(self, seconds: float) -> None:
        self.world.wait(None, seconds / self.rate)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.world.random.random()

    def lock(self) -> Condition:  # type: ignore[override]
        return Condition(self)

    def condition(self, lock: object = None) -> Condition:  # type: ignore[override]
        return Condition(self)

    def event(self) -> Event:  # type: ignore[override]
        return Event(self)

    def thread(self, name: str, target: Callable[[], None], *, daemon: bool = True) -> Thread:  # type: ignore[override]
        thread = Thread(self, name, target)
        self.lasting += [] if daemon else [thread]
        return thread

    def end_process(self, code: int) -> NoReturn:
        self.world.note(self.name, f"ends itself with {code}")
        self.lost()
        self.crash()
        raise Crash

    def crash(self) -> None:
        """End all threads at once, wherever they are."""
        self.ended_at = min(self.ended_at, self.world.now)
        self.gone, self.paused = True, False
        for task in [task for task in self.world.tasks if task.machine is self and task.waiting]:
            if task.queue is not None and task in task.queue.tasks:
                task.queue.tasks.remove(task)
            self.world.make_ready(task)
        self._thaw()

    def pause(self, seconds: float) -> None:
        """Stand still for a while, as a laptop does whose lid is closed."""
        self.paused = True
        self.frozen += [task for task in self.world.ready if task.machine is self]
        self.world.ready = [task for task in self.world.ready if task.machine is not self]
        self.world.at(seconds, self._thaw)

    def _thaw(self) -> None:
        self.paused = False
        self.world.ready += self.frozen
        self.frozen = []


class Thread:
    """A thread of a machine."""

    def __init__(self, machine: Machine, name: str, target: Callable[[], None]) -> None:
        self._machine, self._target = machine, target
        self._task = Task(machine, f"{machine.name} {name}")
        self._task.ended = Queue(machine.world)
        self.ident: int | None = None

    def start(self) -> None:
        self.ident = 1
        if self._machine.gone:
            raise Crash
        self._machine.world.spawn(self._task, self._target)

    def is_alive(self) -> bool:
        return self._task in self._machine.world.tasks

    def let_go(self) -> None:
        """Let those who wait for its end go on."""
        assert self._task.ended is not None
        self._task.ended.wake()

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            assert self._task.ended is not None
            self._task.ended.wait(None if timeout is None else timeout / self._machine.rate)


class Condition:
    """A condition; its lock is not needed, because nobody else runs."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._queue = machine, Queue(machine.world)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        deadline = None if timeout is None else self._machine.now() + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - self._machine.now()
            if left is not None and left <= 0:
                break
            if not self._queue.wait(None if left is None else left / self._machine.rate):
                return predicate()
        return result

    def notify_all(self) -> None:
        self._queue.wake()


class Event:
    """A flag to wait for."""

    def __init__(self, machine: Machine) -> None:
        self._set, self._condition = False, Condition(machine)

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._condition.wait_for(self.is_set, timeout))
