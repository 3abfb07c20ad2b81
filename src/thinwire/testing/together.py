"""Several replicas in one process, a thread each, joined by queues: for tests of what they exchange."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from thinwire.replicas.graph import Graph, make_graph
from thinwire.replicas.peers import Peers

HANG = 300.0
"""Seconds after which a replica that waits for another is given up: a guard against hanging, not a measure."""


class QueueWire:
    """One end of a wire between two threads."""

    def __init__(self, outgoing: queue.Queue, incoming: queue.Queue) -> None:
        self.outgoing, self.incoming = outgoing, incoming

    def send(self, data: bytes) -> None:
        self.outgoing.put(bytes(data), timeout=HANG)

    def receive(self) -> bytes:
        return self.incoming.get(timeout=HANG)


def peers_of(graph: Graph) -> list[Peers]:
    """Join all replicas of a graph; as few messages fit as the seam promises, so a method that fills a wire before it reads hangs."""
    ways = [way for edge in graph.weights for way in (edge, edge[::-1])]
    queues: dict[tuple[int, int], queue.Queue] = {way: queue.Queue(maxsize=2) for way in ways}
    return [
        Peers(replica, graph, {other: QueueWire(queues[replica, other], queues[other, replica]) for other in graph.neighbours(replica)})
        for replica in range(graph.count)
    ]


def together(count: int, task: Callable[[Peers], Any], graph: str = "complete") -> list[Any]:
    """Run a task for every replica, each in a thread of its own; return what each returns, or raise the first failure."""
    results: list[Any] = [None] * count
    failures: list[BaseException] = []

    def run(peers: Peers) -> None:
        try:
            results[peers.index] = task(peers)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(peers,), daemon=True) for peers in peers_of(make_graph(graph, count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a replica still waits for another"
    return results
