"""The opened links of one worker, and what is said over them between replicas: the wires of exchanges, the tree of the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from thinwire.config.sections import RunConfig
from thinwire.link.contract import Contract
from thinwire.link.errors import ProtocolError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.link import Link
from thinwire.link.peer import WorkerId
from thinwire.pipeline.backend import MESSAGE_BYTES
from thinwire.pipeline.control import Control, Tree
from thinwire.replicas.graph import make_graph
from thinwire.replicas.peers import CHUNK_BYTES, Peers


@dataclass(frozen=True)
class Links:
    """The neighbours before and behind a stage, and its copies in other replicas."""

    left: Link | None
    right: Link | None
    replicas: Mapping[int, Link]
    """By replica."""

    def everyone(self) -> list[Link]:
        """Return all of them."""
        return [link for link in (self.left, self.right, *self.replicas.values()) if link is not None]


class LinkWire:
    """Carry the messages of an exchange over a link, apart from boundaries and control."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def send(self, data: bytes) -> None:
        self.link.send(Frame.make(Kind.DATA, data, channel=Channel.EXCHANGE, epoch=self.link.epoch))

    def receive(self) -> bytes:
        frame = self.link.receive(Channel.EXCHANGE)
        if frame.header.kind is not Kind.DATA:
            raise ProtocolError("kind", frame.header.kind.name, "DATA")
        return bytes(frame.payload)


def exchange_contract() -> Contract:
    """Say what a link between copies of a stage may carry."""
    return Contract(exchange_bytes=CHUNK_BYTES, limits={Kind.STEP: MESSAGE_BYTES})


def join_peers(config: RunConfig, replica: int, links: Links, parameters: int) -> Peers:
    """Reach the copies of a stage of so many parameters."""
    wires = {other: LinkWire(link) for other, link in links.replicas.items()}
    # More than any method sends: parameters and two moments of every replica, eight bytes each, on their way along the tree.
    largest = config.replicas.count * 32 * parameters + CHUNK_BYTES
    return Peers(replica, make_graph(config.replicas.graph, config.replicas.count), wires, largest)


def join_group(config: RunConfig, worker: WorkerId, links: Links, abandon: Callable[[], None], parameters: int = 0) -> Control:
    """Reach the neighbours of a stage of so many parameters and, from a first stage, those of other replicas."""
    stages, replica = config.pipeline.stages, worker.replica
    peers = join_peers(config, replica, links, parameters)
    tree = Tree()
    if links.left is None:
        parent, children = peers.graph.parents[replica], peers.graph.children(replica)
        tree = Tree(None if parent is None else links.replicas[parent], {child: links.replicas[child] for child in children})
    number, count = replica * stages + worker.stage, config.replicas.count * stages
    return Control(links.left, links.right, tree, replica, number=number, workers=count, peers=peers, abandon=abandon)
