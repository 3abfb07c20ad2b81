"""The links of one worker: whom it dials, whom it waits for, and what both ends may send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from thinwire.cluster.places import Places
from thinwire.config.profiles import find_profile
from thinwire.config.sections import LinkConfig, RunConfig
from thinwire.config.toml import shared_settings
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import Abort, LinkError, Replaced
from thinwire.link.hello import Terms
from thinwire.link.link import Link, More
from thinwire.link.listener import Listener
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker, WorkerId
from thinwire.pipeline.links import Links
from thinwire.replicas.graph import make_graph


class Neighbours:
    """Open and close the links of one worker."""

    def __init__(
        self,
        config: RunConfig,
        places: Places,
        endpoint: Endpoint,
        worker_id: WorkerId,
        run: str,
        listen: str | None = None,
        *,
        held: bool = False,
    ) -> None:
        """Know whom to meet in a run; `listen` is the address to listen on if it is not the roster's."""
        self.places, self.endpoint, self.worker_id = places, endpoint, worker_id
        self.listen, self.held = listen, held
        self.options, self.profile = link_options(config.link), find_profile(config.link.profile)
        self.terms = Terms(run, shared_settings(config), worker_id, places.incarnation)
        self.number_here = worker_id.replica * config.pipeline.stages + worker_id.stage if held else 0
        """Which of this machine's workers this one is: all are here where a supervisor keeps their ports, else it is alone."""
        self.sides = worker_id.sides(config.pipeline.stages)
        """The workers before (-1) and behind (1) this one."""
        graph = make_graph(config.replicas.graph, config.replicas.count)
        self.in_replicas = {replica: WorkerId(replica, worker_id.stage) for replica in graph.neighbours(worker_id.replica)}
        """The workers of this stage in the replicas that this one is joined with."""
        self.stopping = False
        """Whether the links were told that the run is to end at once; those that are opened now are told too."""
        self.replaced: Replaced | None = None
        """Why this process has to end, once a neighbour has met a newer one of this worker."""
        self.report: Callable[[dict[str, Any]], None] = lambda event: None
        """Told where this worker listens, and what its lines were found to carry."""
        self.listener: Listener | None = None
        self.others: tuple[Worker, ...] = places.roster.standbys
        """Who may connect besides the neighbours: a standby that holds a worker id is there before this worker knows of it."""
        self.opened: dict[WorkerId, Link] = {}

    @property
    def ending(self) -> bool:
        """Tell whether nobody trains any more: the workers agree on the last step."""
        return self.terms.ending

    def end_run(self) -> None:
        """Meet from now on only those who know that the run ends."""
        self.stopping, self.terms = False, replace(self.terms, ending=True)

    def open(self, contracts: Mapping[WorkerId, Contract], epoch: int = 0, timeout: float | None = None) -> Links:
        """Open the links to these workers in an epoch, with what each may carry; return when all of them have come."""
        peers = {worker_id: self.places.worker(worker_id) for worker_id in contracts}
        listens = {worker_id: self._listens_for(worker_id) for worker_id in contracts}
        if self.listener is not None:
            self.listener.admit(peers.values(), self.others)  # a worker id may have another holder than in the epoch before
        elif any(listens.values()):
            address = self.listen or self.places.worker(self.worker_id).address
            assert address is not None
            self.listener = Listener(address, self.endpoint, peers.values(), replace(self.options, held=self.held), self.others)
            self.report({"listening": address})
        for worker_id, contract in contracts.items():
            self.opened[worker_id] = self._link(peers[worker_id], replace(contract, epoch=epoch), dials=not listens[worker_id])
        if self.stopping:
            self.interrupt()
        for link in list(self.opened.values()):
            link.wait_open(timeout)
        replicas = {worker_id.replica: link for worker_id, link in self.opened.items() if worker_id.replica != self.worker_id.replica}
        left, right = (self.opened.get(self.sides[side]) if side in self.sides else None for side in (-1, 1))
        return Links(left, right, replicas)

    def dialled(self, peer: WorkerId) -> str | None:
        """Return the address that is dialled to reach a peer; None: it dials in."""
        return None if self._listens_for(peer) else self.places.worker(peer).address

    def _listens_for(self, peer: WorkerId) -> bool:
        return self.places.listener(self.worker_id, peer) == self.worker_id

    def _link(self, peer: Worker, contract: Contract, *, dials: bool) -> Link:
        more: More = {
            "options": self.options,
            "profile": self.profile,
            "failed": partial(self._pass_on, peer.id),
            "newest": self.places.newest(peer.id),
        }
        if dials:
            return Link.connect(peer, self.endpoint, self.terms, contract, **more)
        assert self.listener is not None
        return Link.listen(self.listener, peer, self.terms, contract, **more)

    def _pass_on(self, peer: WorkerId, error: LinkError) -> None:
        """Fail all other links too: whoever waits there, here or beyond them, must not wait for ever."""
        if isinstance(error, Replaced):
            self.replaced = error  # whoever waits at another link hears that the epoch is over, which is not all
        for worker_id, link in list(self.opened.items()):
            if worker_id != peer:
                link.abort(error.reason, error.passed_on)

    def interrupt(self) -> None:
        """Fail all links, because the run is to end at once: whoever waits for one gives up, here and beyond."""
        self.stopping = True
        for link in list(self.opened.values()):
            link.abort(f"{self.worker_id} was asked to end", Abort.STOPPING)

    def drop(self, reason: LinkError) -> None:
        """End the links of an epoch; whoever is at their other ends is told why."""
        for link in self.opened.values():
            link.abort(reason.reason, reason.passed_on)
        for link in self.opened.values():
            link.close()
        newest = {}
        for worker_id, link in self.opened.items():
            newest[worker_id] = link.newest
        self.places.meet(newest)
        self.opened = {}

    def close(self) -> None:
        """Deliver what is queued and end all threads."""
        for link in self.opened.values():
            link.close()
        self.opened = {}
        if self.listener is not None:
            self.listener.close()
            self.listener = None


def link_options(link: LinkConfig) -> LinkOptions:
    """Return the numbers of a link that the config sets."""
    return LinkOptions(
        pace_mbps=link.pace_mbps,
        ping_seconds=link.ping_seconds,
        silent_seconds=link.silent_seconds,
        reconnect_seconds=link.reconnect_seconds,
    )
