"""The links of one worker: whom it dials, whom it waits for, and what both ends may send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

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
from thinwire.link.roster import Roster
from thinwire.pipeline.links import Links
from thinwire.replicas.graph import make_graph


class Neighbours:
    """Open and close the links of the worker at `place`."""

    def __init__(
        self,
        roster: Roster,
        endpoint: Endpoint,
        worker_id: WorkerId,
        run: str,
        incarnation: int = 0,
        listen: str | None = None,
        *,
        held: bool = False,
    ) -> None:
        self.roster, self.endpoint, self.worker_id, self.run, self.incarnation = roster, endpoint, worker_id, run, incarnation
        self.listen, self.held = listen, held
        self.ending = False
        """Whether nobody trains any more: the workers agree on the last step."""
        self.stopping = False
        """Whether the links were told that the run is to end at once; those that are opened now are told too."""
        self.replaced: Replaced | None = None
        """Why this process has to end, once a neighbour has met a newer one of this worker."""
        self.report: Callable[[dict[str, Any]], None] = lambda event: None
        """Told where this worker listens, and what its lines were found to carry."""
        self.listener: Listener | None = None
        self.others: tuple[Worker, ...] = roster.standbys
        """Who may connect besides the neighbours: a standby that has taken a place is there before this worker knows of it."""
        self.opened: dict[WorkerId, Link] = {}
        self.met: dict[str, int | None] = {}
        """The newest incarnation met of each certificate: an older one has been replaced."""

    def open(self, config: RunConfig, contracts: Mapping[WorkerId, Contract], timeout: float | None = None) -> Links:
        """Open the links to these workers, with what each may carry; return when all of them have come."""
        options = link_options(config.link)
        workers = [self.roster.worker(worker_id) for worker_id in contracts]
        if self.listener is not None:
            self.listener.admit(workers, self.others)  # a place may be another worker's than in the epoch before
        elif any(map(self._listens_for, contracts)):
            address = self.listen or self.roster.worker(self.worker_id).address
            assert address is not None
            self.listener = Listener(address, self.endpoint, workers, replace(options, held=self.held), self.others)
            self.report({"listening": address})
        for worker_id, contract in contracts.items():
            self.opened[worker_id] = self._link(worker_id, config, contract, options)
        if self.stopping:
            self.interrupt()
        for link in list(self.opened.values()):
            link.wait_open(timeout)
        across = {worker_id.replica: link for worker_id, link in self.opened.items() if worker_id.replica != self.worker_id.replica}
        return Links(self.opened.get(self.worker_id.beside(-1)), self.opened.get(self.worker_id.beside(1)), across)

    def joined(self, config: RunConfig) -> dict[int, WorkerId]:
        """Return the places of this stage in the replicas that this one is joined with."""
        graph = make_graph(config.replicas.graph, config.replicas.count)
        return {replica: WorkerId(replica, self.worker_id.stage) for replica in graph.neighbours(self.worker_id.replica)}

    def dialled(self, peer: WorkerId) -> str | None:
        """Return the address that is dialled to reach a peer; None: it dials in."""
        return None if self._listens_for(peer) else self.roster.worker(peer).address

    def _listens_for(self, peer: WorkerId) -> bool:
        return self.roster.listener(self.worker_id, peer) == self.worker_id

    def _link(self, peer: WorkerId, config: RunConfig, contract: Contract, options: LinkOptions) -> Link:
        terms = Terms(self.run, shared_settings(config), self.worker_id, self.incarnation, self.ending)
        more: More = {
            "options": options,
            "profile": find_profile(config.link.profile),
            "failed": partial(self._pass_on, peer),
            "newest": self.met.get(self.roster.worker(peer).certificate),
        }
        if self._listens_for(peer):
            assert self.listener is not None
            return Link.listen(self.listener, self.roster.worker(peer), terms, contract, **more)
        return Link.connect(self.roster.worker(peer), self.endpoint, terms, contract, **more)

    def _pass_on(self, peer: WorkerId, error: LinkError) -> None:
        """Fail all other links too: whoever waits there, here or beyond them, must not wait for ever."""
        if isinstance(error, Replaced):
            self.replaced = error  # whoever waits at another link hears that the epoch is over, which is not all
        for worker_id, link in list(self.opened.items()):
            if worker_id != peer:
                link.abort(error.reason, passed_on(error))

    def interrupt(self) -> None:
        """Fail all links, because the run is to end at once: whoever waits for one gives up, here and beyond."""
        self.stopping = True
        for link in list(self.opened.values()):
            link.abort(f"{self.worker_id} was asked to end", Abort.STOPPING)

    def drop(self, reason: LinkError) -> None:
        """End the links of an epoch; whoever is at their other ends is told why."""
        for worker_id, link in self.opened.items():
            self.met[self.roster.worker(worker_id).certificate] = link.newest
            link.abort(reason.reason, passed_on(reason))
        self._close_links()

    def close(self) -> None:
        """Deliver what is queued and end all threads."""
        self._close_links()
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def _close_links(self) -> None:
        for link in self.opened.values():
            link.close()
        self.opened = {}


def passed_on(error: LinkError) -> Abort:
    """Return the code told to the other neighbours: that this process was replaced concerns nobody else, they have a newer one to meet."""
    return Abort.RECOVERING if error.code is Abort.REPLACED else error.code


def link_options(link: LinkConfig) -> LinkOptions:
    """Translate the config's words."""
    return LinkOptions(
        pace_mbps=link.pace_mbps,
        ping_seconds=link.ping_seconds,
        silent_seconds=link.silent_seconds,
        reconnect_seconds=link.reconnect_seconds,
    )
