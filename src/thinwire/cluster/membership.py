"""One worker of a run: which stage, with which settings, among whom. What it does there is up to the verb."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.cluster.neighbours import Neighbours
from thinwire.config.sections import RunConfig
from thinwire.link.endpoint import Endpoint
from thinwire.link.identity import Identity
from thinwire.link.peer import WorkerId
from thinwire.link.roster import Roster
from thinwire.util.files import write_atomic
from thinwire.util.runtime import REAL, Runtime


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A stage, the roster that lists it and the identity that proves it."""

    config: RunConfig
    roster: Roster
    identity: Identity
    stage: int
    replica: int = 0
    listen: str | None = None
    """Address to listen on if it is not the roster's."""
    held: bool = False
    """Whether a supervisor on this machine keeps the port of the address for this worker."""
    incarnation: int | None = None
    """The number of this process that a supervisor gave it; unset: from the clock."""

    runtime: Runtime = REAL
    """The clock and the threads of this worker."""

    def neighbours(self, purpose: str, folder: Path | None = None) -> Neighbours:
        """Return the links to make, checked; workers that meet for another purpose refuse each other.

        With a folder the worker's incarnation grows even if the clock goes back.
        """
        stages, replicas, worker_id = self.config.pipeline.stages, self.config.replicas.count, WorkerId(self.replica, self.stage)
        if not 0 <= self.stage < stages:
            raise ValueError(f"there is no stage {self.stage}: pipeline.stages is {stages}; choose 0 to {stages - 1}")
        if not 0 <= self.replica < replicas:
            raise ValueError(f"there is no replica {self.replica}: replicas.count is {replicas}; choose 0 to {replicas - 1}")
        if self.roster.worker(worker_id).certificate.strip() != self.identity.certificate.strip():
            raise ValueError(
                f"the roster's certificate for {worker_id} is not that of {self.identity.certificate_path}; "
                "use the keys it was made with, or write the roster again with this certificate"
            )
        run = f"{purpose}-{run_name(self.roster)}"
        number = self.incarnation or incarnation(folder, self.stage)
        endpoint = Endpoint(self.identity, self.runtime)
        return Neighbours(self.roster, endpoint, worker_id, run, incarnation=number, listen=self.listen, held=self.held)


def run_name(roster: Roster) -> str:
    """Name a run by its members: all of them derive the same name."""
    members = "\n".join(f"{worker_id} {worker.certificate.strip()}" for worker_id, worker in roster.workers.items())
    return hashlib.sha256(members.encode()).hexdigest()[:16]


def incarnation(folder: Path | None, stage: int) -> int:
    """Return a number that differs each time this worker starts, and grows, even if the clock went back since it was remembered."""
    now = time.time_ns() // 1000
    path = None if folder is None else incarnation_file(folder, stage)
    before = path.read_text() if path is not None and path.is_file() else ""
    return max(now, int(before) + 1) if before.isdigit() else now


def remember(folder: Path, stage: int, number: int) -> None:
    """Keep a worker's incarnation with its checkpoints."""
    path = incarnation_file(folder, stage)
    with suppress(OSError):  # a full disk: the clock alone makes the next number larger
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, str(number).encode())


def incarnation_file(folder: Path, stage: int) -> Path:
    """Say where it is kept."""
    return folder / "checkpoints" / f"incarnation-{stage}"
