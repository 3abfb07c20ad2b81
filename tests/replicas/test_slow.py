"""One replica is slow: how far the others get ahead of it, method by method (docs/exchanges.md).

First at the seam, four replicas that only exchange; the slow one goes on when nobody else can. Then in worker processes, two replicas of
two stages, of which one stands still until the other is ahead.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from faults.inject import GO, Fault, train_with
from patience import HANG
from thinwire.config.options import options_from_spec
from thinwire.config.sections import ModelConfig, ReplicasConfig, RunConfig, TrainConfig
from thinwire.link.peer import WorkerId
from thinwire.model.cut import StagePlan
from thinwire.replicas.exchange import make_exchange
from thinwire.testing.together import together

STEPS, REPLICAS, SLOW = 12, 4, 3
METHODS = {
    "allreduce": ("complete", 1),
    "hybrid": ("complete", 1),
    "powersgd:rank=2": ("complete", 1),
    "threshold:density=0.1": ("complete", 1),
    "gravac": ("complete", 1),
    "powergossip": ("0-1,1-2,2-3", 1),
    "local:steps=4": ("complete", 4),
    "ist:steps=4": ("complete", 4),
}
"""Graph, and by how many steps a replica can be ahead of the slow one: 1 where all wait in every step, or H. In gossip word of a step goes
along a line of 3 edges within its 8 iterations."""
MODEL = ModelConfig(vocabulary=64, width=16, layers=1, heads=4, kv_heads=4, ffn=24, context=8)


class Line:
    """One wire end of a graph whose slow replica sends only when nobody else can do anything without it."""

    def __init__(self, world: World, me: int, other: int) -> None:
        self.world, self.me, self.outgoing, self.incoming = world, me, world.queues[me, other], world.queues[other, me]

    def send(self, data: bytes) -> None:
        if self.me == SLOW:
            self.world.wait(lambda: self.world.stuck == REPLICAS - 1)
        self.world.block(self.me, lambda: len(self.outgoing) < 2)
        self.outgoing.append(bytes(data))
        self.world.changed.notify_all()
        self.world.changed.release()

    def receive(self) -> bytes:
        self.world.block(self.me, lambda: bool(self.incoming))
        data = self.incoming.popleft()
        self.world.changed.notify_all()
        self.world.changed.release()
        return data


class World:
    """All queues between replicas under one lock, so that it is known who waits for whom."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues = defaultdict(deque)
        self.waits: dict[int, Callable[[], bool]] = {}
        self.over: set[int] = set()

    @property
    def stuck(self) -> int:
        """Count the others that have done all their steps, or wait for what is not there."""
        return len(self.over - {SLOW}) + sum(not ready() for index, ready in self.waits.items() if index != SLOW)

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, HANG)

    def block(self, index: int, ready: Callable[[], bool]) -> None:
        """Wait for something; return with the lock held."""
        self.changed.acquire()
        self.waits[index] = ready
        self.changed.notify_all()
        found = self.changed.wait_for(ready, HANG)
        del self.waits[index]
        assert found, "a replica still waits for another"

    def end(self, index: int) -> None:
        with self.changed:
            self.over.add(index)
            self.changed.notify_all()


class Optimizer:
    """Plain gradient steps, with the state that methods may ask for."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.named, self.axes = named, {}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        assert not tensors


def parameters() -> dict[str, nn.Parameter]:
    """Make the parameters of one layer, the same for every replica."""
    from thinwire.codecs.build import codec_defaults
    from thinwire.codecs.dense import Dense
    from thinwire.model.stage import Stage

    codec = Dense(codec_defaults("dense"), MODEL, seed=0)
    return Stage(MODEL, StagePlan(0, 1, range(1)), codec, 0, 0).trained()


def progress(method: str, graph: str) -> list[tuple[int, int]]:
    """Let all replicas do their steps; return in order who has finished which."""
    config = RunConfig(
        model=MODEL,
        train=TrainConfig(steps=STEPS, batch=REPLICAS),
        replicas=ReplicasConfig(count=REPLICAS, graph=graph),
        exchange=options_from_spec("exchange", method),
    )
    config = replace(config, pipeline=replace(config.pipeline, stages=1, microbatches=1))
    finished: list[tuple[int, int]] = []
    lock, world = threading.Lock(), World()

    def work(peers):
        peers.wires = {other: Line(world, peers.index, other) for other in peers.wires}
        named = parameters()
        exchange, generator = make_exchange(config, peers, named), torch.Generator().manual_seed(peers.index)
        for step in range(STEPS):
            gradients = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in named.items()}
            exchange.gradients(gradients, step)
            with torch.no_grad():
                for name, tensor in named.items():
                    tensor -= 0.01 * gradients[name]
            exchange.commit()
            exchange.parameters({name: tensor.data for name, tensor in named.items()}, Optimizer(named), step)
            exchange.commit()
            with lock:
                finished.append((peers.index, step))
        world.end(peers.index)

    together(REPLICAS, work, graph)
    return finished


@pytest.mark.parametrize("method", METHODS)
def test_nobody_gets_further_ahead_of_a_slow_replica_than_its_method_allows(method):
    graph, allowed = METHODS[method]
    done = [0] * REPLICAS
    lead = 0
    for replica, step in progress(method, graph):
        done[replica] = step + 1
        lead = max(lead, done[replica] - done[SLOW])
    assert lead <= allowed
    if method.startswith(("local", "ist")):
        assert lead > 1, "nobody got ahead: the others waited in every step"


ROUND = 5
IN_WORKERS = {"powersgd:rank=2": 1, "hybrid": 1, "threshold:density=0.1": 1, "gravac": 1, "powergossip": 1, "allreduce": 1}
IN_WORKERS |= {f"local:steps={ROUND}": ROUND, f"ist:steps={ROUND}": ROUND}
QUICK = ("powersgd:rank=2", f"local:steps={ROUND}")


@pytest.mark.parametrize("method", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in IN_WORKERS])
def test_in_workers_too(config, tmp_path, method):
    """All agree on every step at which replicas meet, in gossip too; between meetings the fast one goes on alone."""
    count = 3 if method == "powergossip" else 2  # a line of three: the first does not wait for the last one's messages
    words = ["--config", config, "--run", str(tmp_path / "run"), "--replicas.count", str(count), "--train.batch", str(4 * count)]
    words += ["--replicas.graph", ",".join(f"{other - 1}-{other}" for other in range(1, count)), "--codec.name", "dense"]
    words += ["--replicas.exchange", method, "--train.validate_every", "0"]
    steps: list[tuple[WorkerId, dict]] = []
    ahead = IN_WORKERS[method] - 1  # steps that the fast one can do while the slow one stands still before its first

    def release(stage: int, message: dict) -> None:
        if steps and max((said["step"] for worker_id, said in steps if worker_id.replica == 0), default=0) >= ahead:
            (tmp_path / "struck" / GO).touch()

    slow = [Fault(0, "forward", 1, "hold", replica=count - 1)]
    if not ahead:
        (tmp_path / "struck").mkdir()
        (tmp_path / "struck" / GO).touch()
    summary = train_with(words, slow, tmp_path / "struck", steps=steps, hear=release)
    done, lead = [0] * count, 0
    for worker_id, message in sorted(steps, key=lambda said: said[1]["at"]):
        if worker_id.stage == 0:
            done[worker_id.replica] = message["step"]
            lead = max(lead, done[0] - done[-1])
    assert done == [6] * count and summary["weights_sha256"] == count * summary["weights_sha256"][:2]
    assert lead <= IN_WORKERS[method]
    if IN_WORKERS[method] > 1:
        assert lead > 1, "the fast replica waited in every step"
