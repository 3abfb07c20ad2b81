"""What copies of one stage say to each other: bytes between neighbours of the graph, and collectives made of them.

A method sees replicas by their numbers and never a link. All calls are collective: every replica makes the same ones in the same order.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from typing import Protocol

from thinwire.replicas.graph import Graph

CHUNK_BYTES = 2**20
"""Both ends of a wire send a chunk and then take one, so neither waits for the other with its hands full."""
LENGTH = struct.Struct("<Q")
LARGEST = 2**30
"""Most bytes of one message, unless said otherwise."""


class ReplicaLink(Protocol):
    """One way to a neighbour; at least two chunks can be under way in each direction."""

    def send(self, data: bytes) -> None: ...

    def receive(self) -> bytes: ...


class Peers:
    """The other copies of a stage, as one of them sees them."""

    def __init__(self, index: int, graph: Graph, wires: Mapping[int, ReplicaLink], largest: int = LARGEST) -> None:
        """Talk over these wires; a message of more than `largest` bytes is refused before it is taken."""
        self.largest = largest
        assert set(wires) == set(graph.neighbours(index)), (index, sorted(wires))
        self.index, self.count, self.graph, self.wires = index, graph.count, graph, wires
        self.sent = 0
        """Bytes of all messages sent, without frames and lengths."""
        self.wait_seconds = 0.0
        self._told = 0

    def swap(self, outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send neighbours a message each and take one from each of them; both sides must name each other."""
        lengths = {peer: LENGTH.pack(len(data)) for peer, data in outgoing.items()}
        started = time.perf_counter()
        for peer, length in lengths.items():
            self.wires[peer].send(length)
        wanted = {peer: self._length(peer) for peer in outgoing}
        found: dict[int, bytearray] = {peer: bytearray() for peer in outgoing}
        most = max(max(map(len, outgoing.values()), default=0), max(wanted.values(), default=0))
        for start in range(0, most, CHUNK_BYTES):
            for peer, data in outgoing.items():
                if start < len(data):
                    self.wires[peer].send(data[start : start + CHUNK_BYTES])
            for peer, size in wanted.items():
                if start < size:
                    found[peer] += self._chunk(peer, min(CHUNK_BYTES, size - start))
        self.wait_seconds += time.perf_counter() - started
        self.sent += sum(map(len, outgoing.values()))
        return {peer: bytes(data) for peer, data in found.items()}

    def take_wait(self) -> float:
        """Return the seconds spent in swaps since the last call."""
        seconds, self.wait_seconds = self.wait_seconds, 0.0
        return seconds

    def take_sent(self) -> int:
        """Return the bytes sent since the last call."""
        sent, self._told = self.sent - self._told, self.sent
        return sent

    def gather(self, own: bytes) -> list[bytes]:
        """Return what every replica gives, by number, on any graph."""
        if self.graph.complete:
            found = self.swap(dict.fromkeys(self.wires, own))
            return [own if replica == self.index else found[replica] for replica in range(self.count)]
        parent, children = self.graph.parents[self.index], self.graph.children(self.index)
        parts = {self.index: own}
        for child in children:
            parts |= self._unpack(self.take(child))
        if parent is not None:
            self.give(parent, self._pack(parts))
            parts = self._unpack(self.take(parent))
            if len(parts) != self.count:
                raise ValueError(f"replica {parent} passed on the messages of {len(parts)} replicas; there are {self.count}")
        for child in children:
            self.give(child, self._pack(parts))
        return [parts[replica] for replica in range(self.count)]

    def give(self, peer: int, data: bytes) -> None:
        """Send one neighbour a message, which takes it."""
        self.swap({peer: data})

    def take(self, peer: int) -> bytes:
        """Take a message that one neighbour gives."""
        return self.swap({peer: b""})[peer]

    def _length(self, peer: int) -> int:
        (length,) = LENGTH.unpack(self._chunk(peer, LENGTH.size))
        if length > self.largest:
            raise ValueError(f"replica {peer} announces a message of {length} bytes; the limit is {self.largest}")
        return length

    def _chunk(self, peer: int, size: int) -> bytes:
        data = self.wires[peer].receive()
        if len(data) != size:
            raise ValueError(f"replica {peer} sent {len(data)} bytes where {size} were expected; the replicas have lost step")
        return data

    @staticmethod
    def _pack(parts: Mapping[int, bytes]) -> bytes:
        return b"".join(LENGTH.pack(replica) + LENGTH.pack(len(data)) + data for replica, data in sorted(parts.items()))

    def _unpack(self, data: bytes) -> dict[int, bytes]:
        parts: dict[int, bytes] = {}
        start, head = 0, 2 * LENGTH.size
        while start < len(data):
            if start + head > len(data):
                raise ValueError(f"a message between replicas ends within a length, at byte {len(data)}")
            replica, size = (LENGTH.unpack_from(data, start + offset)[0] for offset in (0, LENGTH.size))
            start += head
            if replica >= self.count or replica in parts or start + size > len(data):
                raise ValueError(f"a message between replicas names replica {replica} with {size} bytes; it holds {len(data) - start}")
            parts[replica] = data[start : start + size]
            start += size
        return parts
