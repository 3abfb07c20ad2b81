"""Who holds which worker id, as one process of a run knows it: the one object that everyone here asks, and its one file.

The roster that people exchange stays as it is: it names the run. A standby that replaces a lost machine holds that machine's worker id
from the next epoch on. Each machine that joins a roster keeps in its run folder which worker ids standbys hold, and the number of its own
last process; of the other processes it knows the newest for as long as it lives.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.link.identity import fingerprint
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.roster import Roster, listener_of
from thinwire.util.disk import shortage
from thinwire.util.files import matching, read_small, write_atomic
from thinwire.util.notices import warn
from thinwire.util.shown import shown

PLACES_FILE = "places.json"
PLACES_BYTES = 2**24
EARLIER_BYTES = 64
"""Most bytes of the file in which earlier versions kept the number of a process."""
MOST_INCARNATIONS = 2**63


class Places:
    """The holders of a roster's worker ids, now and in the next epoch; threads may ask and tell at the same time."""

    def __init__(
        self, roster: Roster, run: Path | None = None, *, incarnation: int = 0, holders: Mapping[WorkerId, Worker] | None = None
    ) -> None:
        """Know a roster, and the standbys that hold worker ids of it; without a run folder nothing is written.

        `incarnation` is the number of this process: larger than that of any before it with the same certificate.
        """
        self.roster, self.incarnation = roster, incarnation
        self.path = None if run is None else run / PLACES_FILE
        self._holders = dict(holders or {})
        self._next: dict[WorkerId, Worker] = {}
        self._replaced: set[WorkerId] = set()
        self._met: dict[str, int] = {}
        self._written: bytes | None = None
        self._lock = threading.Lock()

    def worker(self, worker_id: WorkerId) -> Worker:
        """Return who holds a worker id in this epoch."""
        known = self._holders.get(worker_id) or self.roster.workers.get(worker_id)
        return known or self.roster.worker(worker_id)  # which raises, with what there is

    def called(self, worker_id: WorkerId) -> str:
        """Call a worker id by the name of who holds it, if it has one: `attic (stage 1)`."""
        return self.roster.called(worker_id, self._holders.get(worker_id))

    def listener(self, first: WorkerId, second: WorkerId) -> WorkerId:
        """Tell which of two workers listens."""
        return listener_of(self.worker(first), self.worker(second))

    def held_by(self, standby: Worker) -> WorkerId | None:
        """Return the worker id that a standby holds."""
        return next((each for each, worker in self._holders.items() if worker.certificate == standby.certificate), None)

    def take(self, worker_id: WorkerId, standby: Worker) -> None:
        """Let a standby, this machine, hold a worker id from now on; raise ValueError if that cannot be written down."""
        holders = given(self._holders, {worker_id: standby})
        try:
            self._write(holders)
        except OSError as error:
            assert self.path is not None
            raise ValueError(shortage(self.path, error)) from error
        self._holders = holders

    def expect(self, worker_id: WorkerId, standby: Worker, *, replaced: bool = False) -> None:
        """Let a standby hold a worker id from the next epoch on; `replaced`: it took it while this process was there."""
        with self._lock:
            self._next[worker_id] = standby
            self._replaced |= {worker_id} if replaced else set()

    def changes(self, worker_id: WorkerId) -> bool:
        """Tell whether a worker id has another holder in the next epoch."""
        return worker_id in self._next

    def was_replaced(self, worker_id: WorkerId) -> bool:
        """Tell whether a standby took a worker id while this process was there."""
        return worker_id in self._replaced

    def begin_epoch(self) -> None:
        """Let those who hold a worker id from the next epoch on hold it now, and write that down."""
        with self._lock:
            coming, self._next = self._next, {}
        changed = {each: standby for each, standby in coming.items() if self.worker(each).certificate != standby.certificate}
        if changed:
            self._holders = given(self._holders, changed)
            self.keep()

    def meet(self, incarnations: Mapping[WorkerId, int | None]) -> None:
        """Note the numbers of the newest processes that were met of those who hold worker ids: older ones have been replaced."""
        self._met |= {self.worker(each).certificate: number for each, number in incarnations.items() if number is not None}

    def newest(self, worker_id: WorkerId) -> int | None:
        """Return the number of the newest process that was met of whoever holds a worker id."""
        return self._met.get(self.worker(worker_id).certificate)

    def keep(self) -> None:
        """Write down who holds what, and the number of this process; a full disk costs a warning, for the standbys know, and the clock."""
        try:
            self._write(self._holders)
        except OSError as error:
            assert self.path is not None
            warn(f"{self.path} was not written: {shortage(self.path, error)}. Training goes on")

    def _write(self, holders: Mapping[WorkerId, Worker]) -> None:
        """Write the file, unless it says the same already."""
        if self.path is None:
            return
        taken = [
            {"replica": worker_id.replica, "stage": worker_id.stage, "standby": fingerprint(worker.certificate)}
            for worker_id, worker in holders.items()
        ]
        content = {"run": self.roster.run_name, "taken": taken, "incarnation": self.incarnation}
        data = json.dumps(content, indent=1).encode()
        if data != self._written:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, data)
            self._written = data


def given(holders: Mapping[WorkerId, Worker], coming: Mapping[WorkerId, Worker]) -> dict[WorkerId, Worker]:
    """Return the holders once standbys have taken worker ids: each holds one, the one it took last."""
    result = dict(holders)
    for worker_id, standby in coming.items():
        result = {each: worker for each, worker in result.items() if worker.certificate != standby.certificate}
        result[worker_id] = replace(standby, id=worker_id)
    return result


def read_places(roster: Roster, run: Path, clock: Callable[[], int] | None = None) -> Places:
    """Return who holds what, as a run folder has it, checked, for a process whose number is larger than that of any before it.

    A folder without the file says nothing; in one of an earlier version the number stands beside the checkpoints. `clock` counts
    nanoseconds.
    """
    before, path = earlier_incarnation(run), run / PLACES_FILE
    holders: dict[WorkerId, Worker] = {}
    if path.is_file():
        name, taken, number = decode_places(path)
        before = max(before, number)
        holders = known_holders(roster, path, name, taken)
    # The number grows even if the clock went back.
    return Places(roster, run, incarnation=max((clock or time.time_ns)() // 1000, before + 1), holders=holders)


def known_holders(roster: Roster, path: Path, name: object, taken: list[tuple[WorkerId, str]]) -> dict[WorkerId, Worker]:
    """Return the standbys that a file names; refuse those of another roster."""
    if taken and name != roster.run_name:
        raise ValueError(
            f"{path} belongs to another roster: its run is {shown(name, 80)}, this one is {roster.run_name}; "
            "use that roster or another --run"
        )
    standbys = {fingerprint(standby.certificate): standby for standby in roster.standbys}
    holders: dict[WorkerId, Worker] = {}
    for worker_id, mark in taken:
        if worker_id not in roster.workers or mark not in standbys:
            raise ValueError(
                f"{path} says that the standby {shown(mark, 100)} holds {worker_id}, and the roster lists no such standby or worker; "
                "use the roster with which that happened"
            )
        holders = given(holders, {worker_id: standbys[mark]})
    return holders


def decode_places(path: Path) -> tuple[object, list[tuple[WorkerId, str]], int]:
    """Read the name of the run, who holds what, and the number of the last process; an earlier version did not write the number."""
    try:
        content = json.loads(read_small(path, PLACES_BYTES).decode())
        name, taken, number = content["run"], [read_entry(entry) for entry in content["taken"]], content.get("incarnation", 0)
        if type(number) is not int or not 0 <= number < MOST_INCARNATIONS:
            raise ValueError(f"{shown(number, 80)} is not the number of a process")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} does not say who holds which worker id ({type(error).__name__}: {shown(error)}); delete it, the standbys know"
        ) from None
    return name, taken, number


def read_entry(entry: dict[str, Any]) -> tuple[WorkerId, str]:
    """Read who holds one worker id."""
    replica, stage, mark = entry["replica"], entry["stage"], entry["standby"]
    if type(replica) is not int or type(stage) is not int or type(mark) is not str or len(entry) != 3:
        raise ValueError(f"{shown(entry)} is not a replica, a stage and a fingerprint")
    return WorkerId(replica, stage), mark


def earlier_incarnation(run: Path) -> int:
    """Return the largest number of a process that an earlier version has left in a run folder; 0: none."""
    found = [0]
    for path in matching(run / "checkpoints", "incarnation-*"):
        with suppress(OSError, ValueError):  # one that cannot be read: the clock alone makes the next number larger
            found.append(int(read_small(path, EARLIER_BYTES)))
    return max(number for number in found if number < MOST_INCARNATIONS)
