"""A transport in memory, driven by the clock of the simulation: delays, partial writes, resets, lost machines and cut lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from simulation.scheduler import Machine, Queue, World
from thinwire.link.errors import Alert
from thinwire.link.identity import Identity, certificate_of
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker
from thinwire.link.problem import NO_ATTEMPT, Problem, Unreached
from thinwire.util.runtime import Runtime


class Network:
    """All machines, and how bytes get from one to another."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.acceptors: dict[str, MemoryAcceptor] = {}
        self.streams: list[MemoryStream] = []
        self.forgotten: set[Machine] = set()
        """Processes whose address is another's."""
        self.cut: dict[frozenset[str], float] = {}
        """Pairs of machines between which nothing gets through, and until when."""

    def delay(self, source: Machine, target: Machine) -> float:
        """Draw how long something takes from one machine to another."""
        held = max(0.0, self.cut.get(frozenset((source.name, target.name)), 0.0) - self.world.now)
        return held + 0.001 + 0.02 * self.world.random.random() ** 4

    def is_cut(self, source: Machine, target: Machine) -> bool:
        return self.cut.get(frozenset((source.name, target.name)), 0.0) > self.world.now

    def between(self, first: str, second: str) -> list[MemoryStream]:
        """List the streams of two machines, one of each pair."""
        self.streams = [stream for stream in self.streams if stream.alive]
        return [stream for stream in self.streams if {stream.machine.name, stream.other.machine.name} == {first, second}]

    def forget(self, machine: Machine) -> None:
        """Let nobody reach a machine any more; what is connected stays so."""
        self.forgotten.add(machine)
        for address in [address for address, acceptor in self.acceptors.items() if acceptor.machine is machine]:
            del self.acceptors[address]

    def lose(self, machine: Machine, *, silently: bool) -> None:
        """Take a machine off; the others hear of it at once, as when a process dies, or never, as when a cable is pulled."""
        self.forget(machine)
        for stream in [stream for stream in self.streams if stream.alive and machine in (stream.machine, stream.other.machine)]:
            for end in (stream, stream.other):
                if end.machine is machine:
                    end.closed = True
                    if not silently:
                        end.other.fail_after(self.delay(machine, end.other.machine))


class Node(Machine):
    """A process on a machine of the network."""

    def __init__(self, network: Network, name: str, *, offset: float = 0.0, rate: float = 1.0) -> None:
        super().__init__(network.world, name, offset=offset, rate=rate)
        self.network, self.lost = network, lambda: network.lose(self, silently=False)


class MemoryStream:
    """One end of a stream."""

    def __init__(self, network: Network, machine: Machine, certificate: bytes, service: str | None) -> None:
        self.network, self.machine, self.own, self.service = network, machine, certificate, service
        self.other: MemoryStream = self
        self.peer = b""
        self.problem: Problem = NO_ATTEMPT
        self.congestion, self.exchanged = "memory", (0, 0)
        self.made = False
        self.unreached: Unreached | None = None
        self.arrived: deque[bytes] = deque()
        self.error: OSError | None = None
        """What a reader gets behind everything that has arrived."""
        self.closed = False
        self.full = False
        self.flying = 0
        self.last_at = 0.0
        self.waiter: MemoryTransport | None = None

    @property
    def alive(self) -> bool:
        return not (self.closed and self.other.closed)

    def wake(self) -> None:
        if self.waiter is not None:
            self.waiter.ring()

    @property
    def readable(self) -> bool:
        return bool(self.arrived) or self.error is not None or self.unreached is not None or (self.peer != b"" and not self.made)

    def ready(self) -> bool:
        if self.unreached is not None:
            raise self.unreached
        self.made = self.peer != b""
        return self.made

    def read(self) -> tuple[int, list[bytes]]:
        if not self.arrived and self.error is not None:
            raise self.error
        records = list(self.arrived)
        self.arrived.clear()
        return sum(map(len, records)), records

    def seal(self, data: bytes) -> bytes:
        return data

    def send(self, data: memoryview) -> int:
        if self.closed or self.machine.gone:
            raise BrokenPipeError("the stream is closed")
        if isinstance(self.error, ConnectionResetError) and self.other.closed:
            raise BrokenPipeError("the peer is gone")
        world, size = self.network.world, len(data)
        if size > 1 and world.random.random() < 0.03:  # a socket that takes only a part
            size = 1 + int(world.random.random() * (size - 1))
            self.full = True
            world.at(0.002, self.drain)
        self.flying += size
        self.deliver(bytes(data[:size]))
        return size

    def drain(self) -> None:
        self.full = False
        self.wake()

    def deliver(self, data: bytes | OSError) -> None:
        """Let bytes, or the end, arrive in their order."""
        world = self.network.world
        at = max(self.last_at, world.now + self.network.delay(self.machine, self.other.machine))
        self.last_at = at
        world.when(at, lambda: self.other.arrive(data))

    def arrive(self, data: bytes | OSError) -> None:
        if self.closed or self.machine.gone:
            if isinstance(data, bytes) and not self.machine.gone:  # the machine is there, and nobody reads: it answers with a reset
                self.other.fail_after(self.network.delay(self.machine, self.other.machine))
            return
        if isinstance(data, OSError):
            self.error = self.error or data
        elif self.error is None:
            self.other.flying -= len(data)
            self.arrived.append(data)
        self.wake()

    def fail_after(self, seconds: float) -> None:
        """Let this end see a reset."""

        def fail() -> None:
            if not self.closed:
                self.arrived.clear()
                self.error = self.error or ConnectionResetError("reset")
                self.wake()

        self.network.world.at(seconds, fail)

    def unacknowledged(self) -> int:
        return self.flying

    def end(self, how: Literal["output", "close", "reset"]) -> None:
        if self.machine.gone or self.closed:
            return
        self.closed = how != "output"
        if self.other is self:
            return
        if how == "reset":
            self.other.fail_after(self.network.delay(self.machine, self.other.machine))
        else:
            self.deliver(ConnectionResetError("the peer closed the connection"))


class MemoryAcceptor:
    """Takes streams at an address."""

    def __init__(self, transport: MemoryTransport, address: str, take: Callable[[MemoryStream], None]) -> None:
        self.machine, self.where, self.take, self.transport = transport.machine, address, take, transport
        self.address, self.refusals, self.admitted = ("memory", 0), deque[str](maxlen=10), frozenset[bytes]()
        self.certificate = certificate_of(transport.identity.certificate)

    def admit(self, certificates: Iterable[str]) -> None:
        self.admitted = frozenset(map(certificate_of, certificates))
        if self.machine not in self.transport.network.forgotten:
            self.transport.network.acceptors[self.where] = self

    def answer(self, theirs: MemoryStream) -> None:
        """Show who this is; the client, which has what it needs then, has still to prove who it is."""
        network = self.transport.network
        mine = MemoryStream(network, self.machine, self.certificate, theirs.service)
        mine.other, theirs.other, mine.peer, mine.made, theirs.peer = theirs, mine, theirs.own, True, self.certificate
        network.streams.append(mine)
        network.world.at(network.delay(theirs.machine, self.machine), lambda: self.accept(mine))

    def accept(self, mine: MemoryStream) -> None:
        """Finish a handshake."""
        network = self.transport.network
        if self.machine.gone:
            return
        if self.machine.paused:
            network.world.at(0.05, lambda: self.accept(mine))
        elif network.acceptors.get(self.where) is not self:
            mine.end("reset")
        elif mine.peer in self.admitted:
            self.take(mine)
        else:
            mine.deliver(Alert("unknown ca"))
            mine.closed = True


class MemoryTransport:
    """The transport of one thread, or of one acceptor."""

    def __init__(self, identity: Identity, runtime: Runtime) -> None:
        assert isinstance(runtime, Node)
        self.identity, self.machine, self.network = identity, runtime, runtime.network
        self._queue, self._rung = Queue(runtime.world), False
        self._acceptor: MemoryAcceptor | None = None
        self._certificate = certificate_of(identity.certificate)

    def dial(self, peer: Worker, options: LinkOptions, service: str | None, *, resolve: bool) -> MemoryStream:
        assert peer.address is not None
        address, expected, network, world = peer.address, certificate_of(peer.certificate), self.network, self.network.world
        stream = MemoryStream(network, self.machine, self._certificate, service)
        stream.problem = Problem(f"{address} did not answer")

        def answer() -> None:
            acceptor = network.acceptors.get(address)
            if stream.closed:
                return
            if acceptor is None:
                stream.unreached = Unreached(Problem(f"{address} refused the connection"))
            elif network.is_cut(self.machine, acceptor.machine):
                return  # nothing comes back: the attempt takes too long
            elif acceptor.certificate != expected:
                stream.unreached = Unreached(Problem(f"another certificate at {address}", patience=False))
            else:
                acceptor.answer(stream)
            stream.wake()

        world.at(0.002 + 0.01 * world.random.random(), answer)
        return stream

    def listen(self, address: str | tuple[str, int], options: LinkOptions, take: Callable[[MemoryStream], None]) -> MemoryAcceptor:
        assert isinstance(address, str)
        if address in self.network.acceptors:
            raise ValueError(f"cannot listen on {address}: it is taken")
        self._acceptor = MemoryAcceptor(self, address, take)
        return self._acceptor

    def wait(self, streams: Mapping[MemoryStream, bool], seconds: float) -> list[MemoryStream]:
        def found() -> list[MemoryStream]:
            return [stream for stream, sending in streams.items() if stream.readable or (sending and not stream.full)]

        for stream in streams:
            stream.waiter = self
        ready = found()
        if not self._rung and not ready:
            self._queue.wait(max(0.0, seconds) / self.machine.rate)
            ready = found()
        elif self.network.world.random.random() < 0.2:
            self._queue.wait(0.0)  # others get their turn first
            ready = found()
        self._rung = False
        return ready

    def ring(self) -> None:
        self._rung = True
        self._queue.wake()

    def wake(self) -> None:
        self.ring()

    def close(self) -> None:
        if self._acceptor is not None and self.network.acceptors.get(self._acceptor.where) is self._acceptor:
            del self.network.acceptors[self._acceptor.where]
