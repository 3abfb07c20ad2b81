"""All machines of a simulated run: the processes on them, who starts them again, and what happens to them."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from simulation.disk import Disks
from simulation.memory import MemoryTransport, Network, Node
from simulation.plan import Fault, Plan
from simulation.scheduler import Machine, Pool, Thread, World
from simulation.work import SimulatedData, SimulatedPipeline
from thinwire.cluster.membership import Membership
from thinwire.cluster.places import read_places
from thinwire.cluster.recover import train_stage
from thinwire.cluster.standby import StandbyClient, StandbyServer
from thinwire.config.registry import TRANSPORTS
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import LinkError
from thinwire.link.identity import Identity
from thinwire.link.link import Link
from thinwire.link.peer import STANDBYS, Worker, WorkerId
from thinwire.link.roster import Roster
from thinwire.run.stop import Stop

FAILED_STARTS = 6
"""After so many starts of a worker its supervisor gives up."""


@dataclass(frozen=True)
class Commit:
    """One step that one process made part of the run."""

    at: float
    place: WorkerId
    process: str
    epoch: int
    step: int
    content: str
    partners: tuple[tuple[WorkerId, int | None], ...]
    """With which process of each neighbour."""
    missing: tuple[WorkerId, ...] = ()
    """Who had not its gradients of the step yet."""


@dataclass(frozen=True)
class Process:
    """One process of a worker, and when it began."""

    node: Node
    stop: Stop
    born: float


@dataclass
class Host:
    """A machine, on which one process after the other runs."""

    number: int
    listed: WorkerId
    """Where the roster's file has it."""
    identity: Identity
    folder: Path
    starts: int = 0
    node: Node | None = None
    main: Thread | None = None
    stop: Stop = field(default_factory=Stop)
    lost: bool = False
    """Whether it is off for good."""
    restart_after: float = 0.5
    stuck: bool = False
    """Whether its next calculation does not end."""
    over: bool = False
    """Whether no process of it is to come any more."""
    place: WorkerId | None = None
    """Which it has, if it trains."""
    ended: str | None = None
    """What its last process has said at its end."""
    summary: dict[str, Any] | None = None

    @property
    def process(self) -> str:
        return f"{self.listed} #{self.starts}"


class Cluster:
    """A run of a plan."""

    def __init__(self, plan: Plan, identities: list[Identity], folder: Path, disks: Disks, pool: Pool) -> None:
        self.plan, self.config, self.disks = plan, plan.shape.config, disks
        self.world = World(plan.seed, pool)
        self.network = Network(self.world)
        disks.wait = lambda: self.world.wait(None, 0.4 * self.world.random.random() ** 3) and None
        self.commits: list[Commit] = []
        self.processes: dict[str, Process] = {}
        self.gradients: dict[tuple[int, int], set[WorkerId]] = defaultdict(set)
        """Who has its gradients of a step of an epoch."""
        self.replaced: set[str] = set()
        """Processes that sleep while a copy of their machine goes on."""
        self.begun_at = float("inf")
        """When the first had agreed with all others on where to begin."""
        self.epochs = 0
        """How many were abandoned."""
        places = [WorkerId(replica, stage) for replica in range(plan.shape.replicas) for stage in range(plan.shape.stages)]
        listed = [*places, *(WorkerId(STANDBYS, number) for number in range(plan.standbys))]
        folders = [folder / (f"replica-{each.replica}" if plan.supervised else f"machine-{number}") for number, each in enumerate(listed)]
        self.hosts = [Host(number, *each) for number, each in enumerate(zip(listed, identities, folders, strict=False))]
        workers = {host.listed: Worker(host.listed, host.identity.certificate, f"memory://{host.number}") for host in self.hosts}
        standbys = tuple(worker for worker_id, worker in workers.items() if worker_id.replica == STANDBYS)
        self.roster = Roster({worker_id: worker for worker_id, worker in workers.items() if worker_id.replica != STANDBYS}, standbys)

    def run(self) -> None:
        """Let everything happen."""
        outside = Machine(self.world, "outside")
        for host in self.hosts:
            outside.thread(f"supervisor of {host.listed}", partial(self.supervise, outside, host)).start()
        for fault in self.plan.faults:
            self.world.at(fault.at, partial(self.happen, fault))
        self.world.run()

    def supervise(self, outside: Machine, host: Host) -> None:
        """Start a worker, and start it again when it was lost; what it says at its end is the end of it."""
        while host.ended is None and not host.lost and host.starts < FAILED_STARTS and not self.is_needless(host):
            host.starts += 1
            offset, rate = self.plan.clocks[host.number]
            host.node = node = Node(self.network, f"machine {host.number}", offset=offset, rate=rate)
            host.stop = Stop(supervised=True)
            self.processes[host.process] = Process(node, host.stop, self.world.now)
            host.main = main = node.thread("main", partial(self.work, host, node, host.process))
            main.start()
            main.join()
            outside.sleep(host.restart_after if host.ended is None else 0.0)
        self.world.note(host.process, f"over: {host.ended or 'lost'}")
        host.over = True
        if all(each.over or self.is_needless(each) for each in self.hosts):
            for process in self.processes.values():  # whoever waits for a run that is over, a person ends
                process.stop.wish(now=False)

    def is_needless(self, host: Host) -> bool:
        """Tell whether a machine stands by for a run that nobody is in any more."""
        return host.listed.replica == STANDBYS and host.place is None and all(each.over for each in self.hosts[: self.plan.workers])

    def work(self, host: Host, node: Node, process: str) -> None:
        """Be a process: what it raises is noted, and nothing of it stays."""
        summary = None
        try:
            summary = self.train(host, node, process)
            ended = f"done at step {summary['steps']}" if summary else "done without a place"
        except (LinkError, ValueError) as error:  # the two kinds that a person is told
            ended = str(error) and f"{type(error).__name__}: {error}"
        for thread in node.lasting:
            thread.join()
        if host.node is node:
            host.ended, host.summary = ended, summary
        else:
            self.world.note(process, f"had a twin, and ended: {ended}")
        node.lost()
        node.crash()

    def train(self, host: Host, node: Node, process: str) -> dict[str, Any] | None:
        """Do what `thinwire join`, or a worker of `thinwire train`, does."""
        endpoint, server, place, folder, stop = Endpoint(host.identity, node), None, host.listed, host.folder, host.stop
        places = read_places(self.roster, folder, lambda: 1000 * (10**6 + 100 * host.starts + host.number))
        if host.listed.replica == STANDBYS:
            server = StandbyServer(places, endpoint, self.config).open()
            taken = server.wait(stop)
            if taken is None:
                server.close()
                return None
            host.place = place = taken
            self.world.note(process, f"takes {place}")
        again = host.starts > 1 and self.world.now > self.begun_at
        member = Membership(
            config=self.config,
            places=places,
            identity=host.identity,
            stage=place.stage,
            replica=place.replica,
            runtime=node,
        )
        data: Any = SimulatedData(self.config) if place.stage == 0 else None
        make = partial(
            SimulatedPipeline,
            runtime=node,
            slowness=partial(self.slowness, host, node),
            computed=partial(self.computed, place),
            committed=partial(self.committed, process, place),
        )
        summary = train_stage(
            member,
            folder,
            resume=again and not self.plan.supervised,
            replacing=again if self.plan.supervised else server is not None and not again,
            copies=not self.plan.supervised,
            stop=stop,
            report=partial(self.hear, process),
            stuck=partial(self.world.note, process),
            server=server,
            make=make,
            data=data,
        )
        if place == WorkerId(0, 0) and self.roster.standbys and summary["steps"] >= self.config.train.steps:
            StandbyClient(self.roster, endpoint, host.listed, self.config).ask_all("over")
        return summary

    def hear(self, process: str, event: dict[str, Any]) -> None:
        """Take what a worker tells people."""
        if "begun" in event or "restored" in event:
            self.begun_at = min(self.begun_at, self.world.now)
        if "abandoned" in event:
            self.epochs = max(self.epochs, event["epoch"] + 1)
        if "measured" not in event:
            self.world.note(process, str({name: value for name, value in event.items() if name != "since"}))

    def slowness(self, host: Host, node: Node) -> float:
        if host.stuck:
            host.stuck = False
            return 1e6
        return node.uniform(0.01, 0.1)

    def computed(self, place: WorkerId, epoch: int, step: int) -> None:
        self.gradients[epoch, step].add(place)

    def committed(self, process: str, place: WorkerId, epoch: int, step: int, content: str, links: Iterable[Link] = ()) -> None:
        self.world.note(process, f"commits step {step} of {place} in epoch {epoch}: {content[:12]}")
        missing = sorted(self.roster.workers.keys() - self.gradients[epoch, step])
        partners = tuple((link.peer, link.newest) for link in links)
        self.commits.append(Commit(self.world.now, place, process, epoch, step, content, partners, tuple(missing)))

    def happen(self, fault: Fault) -> None:
        """Let a fault happen."""
        host = self.hosts[fault.machine]
        self.world.note("fault", f"{fault.kind} {fault.machine} {fault.other} {fault.seconds:.2f}{' disk' if fault.disk else ''}")
        if host.node is not None and not host.node.gone:
            getattr(self, fault.kind.replace(" ", "_"))(fault, host, host.node)

    def reset(self, fault: Fault, host: Host, node: Node) -> None:
        """Lose what is under way for a moment, and then all connections."""
        for other in self.hosts:
            self.network.cut[frozenset((node.name, f"machine {other.number}"))] = self.world.now + fault.seconds / 10
        self.world.at(fault.seconds / 10, partial(self.break_off, node))

    def break_off(self, node: Node) -> None:
        for stream in [stream for other in self.hosts for stream in self.network.between(node.name, f"machine {other.number}")]:
            stream.fail_after(0.0)
            stream.other.fail_after(0.0)

    def cut(self, fault: Fault, host: Host, node: Node) -> None:
        self.network.cut[frozenset((node.name, f"machine {fault.other}"))] = self.world.now + fault.seconds

    def isolate(self, fault: Fault, host: Host, node: Node) -> None:
        for other in self.hosts:
            self.network.cut[frozenset((node.name, f"machine {other.number}"))] = self.world.now + fault.seconds

    def crash(self, fault: Fault, host: Host, node: Node) -> None:
        host.restart_after = fault.seconds
        node.lost()
        node.crash()
        if fault.disk and not self.plan.supervised:
            shutil.rmtree(host.folder, ignore_errors=True)

    def twin(self, fault: Fault, host: Host, node: Node) -> None:
        """Let a machine sleep while a copy of it goes on: two processes of one place, one of which does not know."""
        copy = host.folder.with_name(f"{host.folder.name}-{host.starts}")
        if host.folder.exists():
            shutil.copytree(host.folder, copy)
        self.replaced.add(host.process)
        host.folder, host.restart_after = copy, 0.1
        node.pause(fault.seconds)
        self.network.forget(node)
        assert host.main is not None
        host.main.let_go()

    def freeze(self, fault: Fault, host: Host, node: Node) -> None:
        node.pause(fault.seconds)

    def full_disk(self, fault: Fault, host: Host, node: Node) -> None:
        self.disks.full.add(host.folder)
        self.world.at(fault.seconds, partial(self.disks.full.discard, host.folder))

    def lose(self, fault: Fault, host: Host, node: Node) -> None:
        host.lost = True
        self.network.lose(node, silently=True)
        node.crash()

    def stop(self, fault: Fault, host: Host, node: Node) -> None:
        host.stop.wish(now=False)

    def stop_now(self, fault: Fault, host: Host, node: Node) -> None:
        host.stop.wish(now=True)

    def stuck(self, fault: Fault, host: Host, node: Node) -> None:
        host.stuck = True


@contextmanager
def in_memory() -> Iterator[None]:
    """Let addresses that begin with `memory://` be reached through the simulated network."""
    TRANSPORTS.registered["memory"] = MemoryTransport, ""
    try:
        yield
    finally:
        del TRANSPORTS.registered["memory"]
