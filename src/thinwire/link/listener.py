"""One address for all links of a worker: each connection goes to the link its certificate belongs to.

A peer whose link is not open yet is turned away and tries again. A client that asks for a service, such as that of a standby, goes to
whoever provides it, and never to a link. Whoever is not admitted does not get here: the transport refuses it, and says so in `refusals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from thinwire.link.endpoint import Endpoint
from thinwire.link.identity import certificate_of
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.transport import ByteStream


class Listener:
    """Whom a worker takes connections of, and for what."""

    def __init__(
        self,
        address: str | tuple[str, int],
        endpoint: Endpoint,
        peers: Iterable[Worker],
        options: LinkOptions | None = None,
        others: Iterable[Worker] = (),
    ) -> None:
        """Listen from now on; ValueError if the address cannot be had."""
        self.services: dict[str, Callable[[WorkerId, ByteStream], None]] = {}
        """Who takes the connections for each service; called by the transport's thread, with who asks."""
        self._adopters: dict[WorkerId, Callable[[ByteStream], None]] = {}
        self._places: dict[bytes, WorkerId] = {}
        self._clients: dict[bytes, WorkerId] = {}
        self.endpoint, self.where = endpoint, address
        self._transport = endpoint.transport(address)
        self._acceptor = self._transport.listen(address, options or LinkOptions(), self._route)
        self.admit(peers, others)
        self.refusals = self._acceptor.refusals
        """The latest refusals: who and why."""

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port, the real port if 0 was asked for."""
        return self._acceptor.address

    def admit(self, peers: Iterable[Worker], others: Iterable[Worker] = ()) -> None:
        """Trust these from now on and nobody else: `peers` for links, `others` for services; they are turned away until then."""
        peers, others = tuple(peers), tuple(others)
        self._places = {certificate_of(peer.certificate): peer.id for peer in peers}
        self._clients = {certificate_of(worker.certificate): worker.id for worker in (*peers, *others)}
        self._acceptor.admit({worker.certificate for worker in (*peers, *others)})

    def expect(self, worker_id: WorkerId, adopt: Callable[[ByteStream], None]) -> None:
        """Hand connections of a worker to `adopt` from now on."""
        self.check_free(worker_id)
        self._adopters[worker_id] = adopt

    def check_free(self, worker_id: WorkerId) -> None:
        """Refuse a worker id that is not known or already has a link."""
        if worker_id not in self._places.values():
            raise ValueError(f"this listener was not given the certificate of {worker_id}; name it among the peers")
        if worker_id in self._adopters:
            raise ValueError(f"a link from {worker_id} is already expected here; close it first")

    def forget(self, worker_id: WorkerId) -> None:
        """Stop handing connections of a worker on."""
        self._adopters.pop(worker_id, None)

    def close(self) -> None:
        """Stop listening; links that have their connection keep it."""
        self._transport.close()

    def _route(self, stream: ByteStream) -> None:
        """Hand a finished stream to its link, or to the service it asks for."""
        adopt = self._adopter(stream.peer, stream.service)
        if adopt is None:
            stream.end("close")
        else:
            adopt(stream)

    def _adopter(self, certificate: bytes, service: str | None) -> Callable[[ByteStream], None] | None:
        """Tell who takes the stream of a client now; None: nobody."""
        if service is None:
            worker_id = self._places.get(certificate)
            return None if worker_id is None else self._adopters.get(worker_id)
        serve, client = self.services.get(service), self._clients.get(certificate)
        return None if serve is None or client is None else partial(serve, client)
