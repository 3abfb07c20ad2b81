"""Which replicas are joined: complete, ring, torus, or a list of edges; the weights of gossip; a tree that reaches everyone.

Free of torch and links. An edge list names pairs of replicas, with a weight where gossip is to use another than its own:
`0-1,1-2,2-3` or `0-1:0.25,1-2:0.25`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

NAMED = ("complete", "ring", "torus")
Edge = tuple[int, int]


@dataclass(frozen=True)
class Graph:
    """Joined replicas, each pair once with the lower number first, and the weight of each pair."""

    count: int
    weights: Mapping[Edge, float]

    def neighbours(self, replica: int) -> tuple[int, ...]:
        """Return who is joined with a replica, in order."""
        return tuple(sorted(other for edge in self.weights if replica in edge for other in edge if other != replica))

    def weight(self, first: int, second: int) -> float:
        """Return the share of their difference that two joined replicas give up in a step of gossip."""
        return self.weights[min(first, second), max(first, second)]

    @property
    def complete(self) -> bool:
        return len(self.weights) == self.count * (self.count - 1) // 2

    @cached_property
    def parents(self) -> tuple[int | None, ...]:
        """Return for each replica the one before it on its shortest way to replica 0."""
        parents: dict[int, int | None] = {0: None}
        reached = [0]
        for replica in reached:  # grows while it is walked: nearest first, lower numbers first
            for other in self.neighbours(replica):
                if other not in parents:
                    parents[other] = replica
                    reached.append(other)
        return tuple(parents[replica] for replica in range(self.count))

    def children(self, replica: int) -> tuple[int, ...]:
        """Return those whose way to replica 0 begins with this one."""
        return tuple(other for other, parent in enumerate(self.parents) if parent == replica)


def make_graph(text: str, count: int) -> Graph:
    """Make the graph of a config; refuse one that cannot work, by name."""
    if text == "complete":
        edges: Iterable[Edge] = ((low, high) for high in range(count) for low in range(high))
    elif text == "ring":
        edges = (_sorted(replica, (replica + 1) % count) for replica in range(count) if count > 1)
    elif text == "torus":
        edges = torus(count)
    else:
        given = read_edges(text, count)
        return checked(Graph(count, {edge: _metropolis(edge, given) if weight is None else weight for edge, weight in given.items()}), text)
    chosen = dict.fromkeys(sorted(set(edges)))
    return checked(Graph(count, {edge: _metropolis(edge, chosen) for edge in chosen}), text)


def torus(count: int) -> list[Edge]:
    """Join replicas that stand in a rectangle as square as possible with those above, below, left and right, round the ends."""
    height = max(size for size in range(1, math.isqrt(count) + 1) if count % size == 0)
    width = count // height
    if height < 2:
        raise ValueError(
            f"replicas.graph is torus, but {count} replicas form no rectangle of at least 2 x 2; choose a count such as 4, 6 or 8, or ring"
        )
    pairs = []
    for replica in range(count):
        row, column = divmod(replica, width)
        pairs += [(replica, row * width + (column + 1) % width), (replica, (row + 1) % height * width + column)]
    return [_sorted(*pair) for pair in pairs if pair[0] != pair[1]]


def read_edges(text: str, count: int) -> dict[Edge, float | None]:
    """Read a list of edges."""
    found: dict[Edge, float | None] = {}
    for item in text.split(","):
        pair, colon, weight = item.strip().partition(":")
        first, dash, second = pair.partition("-")
        if not (dash and first.isdigit() and second.isdigit()):
            raise ValueError(
                f"replicas.graph has {item.strip()!r} where two replicas such as 0-1 are expected; write {', '.join(NAMED)}, "
                "or edges such as 0-1,1-2"
            )
        edge = _sorted(int(first), int(second))
        if edge[0] == edge[1] or edge[1] >= count:
            raise ValueError(
                f"replicas.graph joins {pair}: choose two different replicas from 0 to {count - 1} (replicas.count is {count})"
            )
        if edge in found:
            raise ValueError(f"replicas.graph joins {pair} twice; leave one out")
        try:
            found[edge] = float(weight) if colon else None
        except ValueError:
            raise ValueError(f"replicas.graph gives {pair} the weight {weight!r}; write a number such as 0.25") from None
    return found


def checked(graph: Graph, text: str) -> Graph:
    """Refuse a graph in parts, and weights that would not keep the mean."""
    reached, waiting = {0}, [0]
    while waiting:
        new = set(graph.neighbours(waiting.pop())) - reached
        reached |= new
        waiting += new
    apart = sorted(set(range(graph.count)) - reached)
    if apart:
        raise ValueError(
            f"replicas.graph {text} is not connected: no way leads from replica 0 to {', '.join(map(str, apart))}; join them with an edge"
        )
    for edge, weight in graph.weights.items():
        if not 0 < weight <= 1:
            raise ValueError(f"replicas.graph gives {edge[0]}-{edge[1]} the weight {weight}; choose one above 0 and at most 1")
    for replica in range(graph.count):
        total = sum(weight for edge, weight in graph.weights.items() if replica in edge)
        if total > 1 + 1e-12:
            raise ValueError(
                f"the weights of replicas.graph are not doubly stochastic: those of replica {replica} add up to {total:.6g}, which leaves "
                f"{1 - total:.6g} for itself; let them add up to at most 1, or leave them out"
            )
    return graph


def _sorted(first: int, second: int) -> Edge:
    return min(first, second), max(first, second)


def _metropolis(edge: Edge, edges: Iterable[Edge]) -> float:
    """Return the weight that makes any graph doubly stochastic: 1 / (1 + the larger degree)."""
    degrees = [sum(end in other for other in edges) for end in edge]
    return 1 / (1 + max(degrees))
