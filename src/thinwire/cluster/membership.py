"""One worker of a run: which stage, with which settings, among whom. What it does there is up to the verb."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.cluster.neighbours import Neighbours
from thinwire.cluster.places import Places
from thinwire.config.sections import RunConfig
from thinwire.link.endpoint import Endpoint
from thinwire.link.identity import Identity
from thinwire.link.peer import WorkerId
from thinwire.util.runtime import REAL, Runtime


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A stage, who holds which worker id of the roster, this one's too, and the identity that proves it."""

    config: RunConfig
    places: Places
    identity: Identity
    stage: int
    replica: int = 0
    listen: str | None = None
    """Address to listen on if it is not the roster's."""
    held: bool = False
    """Whether a supervisor on this machine keeps the port of the address for this worker."""

    runtime: Runtime = REAL
    """The clock and the threads of this worker."""

    def neighbours(self, purpose: str) -> Neighbours:
        """Return the links to make, checked; workers that meet for another purpose refuse each other."""
        stages, replicas, worker_id = self.config.pipeline.stages, self.config.replicas.count, WorkerId(self.replica, self.stage)
        if not 0 <= self.stage < stages:
            raise ValueError(f"there is no stage {self.stage}: pipeline.stages is {stages}; choose 0 to {stages - 1}")
        if not 0 <= self.replica < replicas:
            raise ValueError(f"there is no replica {self.replica}: replicas.count is {replicas}; choose 0 to {replicas - 1}")
        if self.places.worker(worker_id).certificate.strip() != self.identity.certificate.strip():
            raise ValueError(
                f"the roster's certificate for {worker_id} is not that of {self.identity.certificate_path}; "
                "use the keys it was made with, or write the roster again with this certificate"
            )
        run = f"{purpose}-{self.places.roster.run_name}"
        return Neighbours(
            self.config, self.places, Endpoint(self.identity, self.runtime), worker_id, run, listen=self.listen, held=self.held
        )
