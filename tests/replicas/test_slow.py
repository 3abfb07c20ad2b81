"""One replica on a line ten times slower: how far the others get ahead of it, method by method (docs/exchanges.md).

First at the seam, four replicas that only exchange; then in worker processes, two replicas of two stages over held back links.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from faults.inject import Fault, train_with
from replicas.together import together
from thinwire.config import ModelConfig, ReplicasConfig, RunConfig, TrainConfig
from thinwire.link.roster import Place
from thinwire.model.cut import StagePlan
from thinwire.replicas.exchange import build

STEPS, REPLICAS, SLOW = 12, 4, 3
SECONDS = 0.0005
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


class SlowWire:
    """A wire whose messages take time to leave."""

    def __init__(self, wire, seconds: float) -> None:
        self.wire, self.seconds = wire, seconds

    def send(self, data: bytes) -> None:
        time.sleep(self.seconds)
        self.wire.send(data)

    def receive(self) -> bytes:
        return self.wire.receive()


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
    from thinwire.codecs.dense import Dense
    from thinwire.codecs.registry import find
    from thinwire.model.stages import Stage

    codec = Dense(find("dense").Options(name="dense"), MODEL, seed=0)
    return Stage(MODEL, StagePlan(0, 1, range(1)), codec, 0, 0).trained()


def progress(method: str, graph: str) -> list[tuple[int, int]]:
    """Let all replicas do their steps; return in order who has finished which."""
    config = RunConfig(
        model=MODEL, train=TrainConfig(steps=STEPS, batch=REPLICAS), replicas=ReplicasConfig(count=REPLICAS, exchange=method, graph=graph)
    )
    config = replace(config, pipeline=replace(config.pipeline, stages=1, microbatches=1))
    finished: list[tuple[int, int]] = []
    lock = threading.Lock()

    def work(peers):
        slowness = SECONDS * (10 if peers.index == SLOW else 1)
        peers.wires = {other: SlowWire(wire, slowness) for other, wire in peers.wires.items()}
        named = parameters()
        exchange, generator = build(config, peers, named), torch.Generator().manual_seed(peers.index)
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
    # So thin that steps of the slow replica take as long as several of the fast one, on a busy machine too.
    mbps = 4.0 if IN_WORKERS[method] == 1 else 1.0
    words += ["--replicas.exchange", method, "--train.validate_every", "0", "--link.profile", f"{mbps:g}mbps"]
    slow = [Fault(stage, "restore", 1, "rate", mbps / 10, replica=count - 1) for stage in range(2)]
    steps: list[tuple[Place, dict]] = []
    summary = train_with(words, slow, tmp_path / "struck", steps=steps)
    done, lead = [0] * count, 0
    for place, message in sorted(steps, key=lambda said: said[1]["at"]):
        if place.stage == 0:
            done[place.replica] = message["step"]
            lead = max(lead, done[0] - done[-1])
    assert done == [6] * count and summary["weights_sha256"] == count * summary["weights_sha256"][:2]
    assert lead <= IN_WORKERS[method]
    if IN_WORKERS[method] > 1:
        assert lead > 1, "the fast replica waited in every step"
