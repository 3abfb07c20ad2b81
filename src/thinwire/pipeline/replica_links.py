"""Copies of one stage over links: the wires that exchanges use, and the tree through which all replicas agree."""

from __future__ import annotations

from thinwire.config.sections import RunConfig
from thinwire.link.contract import Contract
from thinwire.link.errors import ProtocolError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.link import Link
from thinwire.model.stage import Stage
from thinwire.pipeline.backend import MESSAGE_BYTES
from thinwire.pipeline.control import Control, Tree
from thinwire.pipeline.neighbours import Links
from thinwire.replicas.graph import Graph, make_graph
from thinwire.replicas.peers import CHUNK_BYTES, Peers


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


def exchange_contract(epoch: int) -> Contract:
    """Say what a link between copies of a stage may carry."""
    return Contract(epoch=epoch, exchange_bytes=CHUNK_BYTES, limits={Kind.STEP: MESSAGE_BYTES})


def join_peers(config: RunConfig, replica: int, links: Links, stage: Stage) -> Peers:
    """Reach the copies of this stage."""
    graph = make_graph(config.replicas.graph, config.replicas.count)
    # More than any method sends: parameters and two moments of every replica, eight bytes each, on their way along the tree.
    largest = config.replicas.count * 32 * sum(parameter.numel() for parameter in stage.parameters()) + CHUNK_BYTES
    return Peers(replica, graph, {other: LinkWire(link) for other, link in links.across.items()}, largest)


def join_control(links: Links, graph: Graph, replica: int) -> Control:
    """Reach the neighbours of this stage and, from a first stage, those of other replicas."""
    if links.left is not None:
        return Control(links.left, links.right, replica=replica)
    parent = graph.parents[replica]
    children = {child: links.across[child] for child in graph.children(replica)}
    return Control(None, links.right, Tree(None if parent is None else links.across[parent], children), replica)
