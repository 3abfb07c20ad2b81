"""A stage that is cheap to train: its gradients are hashes of everything that they depend on, so no mistake before a step goes unseen.

Links, ports, control, optimizer, checkpoints and the loop are the real ones; only what torch's engine computes is replaced.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.bits.raw import raw_bytes
from thinwire.config.sections import RunConfig
from thinwire.link.link import Link
from thinwire.link.peer import WorkerId
from thinwire.model.cut import StagePlan
from thinwire.optim.optimizers import StageOptimizer, clip_scale, rate_factor
from thinwire.pipeline.backend import Port
from thinwire.pipeline.worker import Known, WorkerPipeline
from thinwire.util.runtime import Runtime

WEIGHTS = 4
"""Parameters of a stage."""


class Cell(nn.Module):
    """The parameters of a layer."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(WEIGHTS, dtype=torch.float32) + layer)


class SimulatedStage(nn.Module):
    """What the loop and the checkpoints need of a stage."""

    def __init__(self, config: RunConfig, plan: StagePlan) -> None:
        super().__init__()
        self.plan, self.model, self.matrices, self.axes = plan, config.model, set[str](), dict[str, int]()
        self.frozen: frozenset[str] = frozenset()
        self.layers = nn.ModuleDict({str(layer): Cell(layer) for layer in plan.layers})
        self.stream = SimpleNamespace(version=0, basis=lambda: None, fingerprint=lambda: "simulated")
        self.entry, self.exit = None if plan.first else nn.Identity(), None if plan.last else nn.Identity()
        self.architecture = SimpleNamespace(count=lambda model, layers: WEIGHTS * layers)

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def owned(self) -> list[Any]:
        return []

    def copies(self) -> list[Any]:
        return []

    def commit_ends(self) -> None:
        """Drop nothing: nothing is shared."""

    def figures(self) -> dict[str, float]:
        return {}

    def content(self) -> bytes:
        """Return all weights."""
        return b"".join(map(raw_bytes, self.parameters()))


class HashEngine:
    """Send hashes down the chain and back up; both ways they go over the ports, as payloads do."""

    def __init__(self, stage: SimulatedStage, ports: dict[int, Port], runtime: Runtime, slowness: Callable[[], float]) -> None:
        self.stage, self.ports, self.runtime, self.slowness = stage, ports, runtime, slowness
        self.group = SimpleNamespace(ports=ports)

    def rebuild(self, schedule: str, in_flight: list[int]) -> None:
        """Make nothing: there is one microbatch."""

    def measure(self) -> float:
        return 0.01

    def step(self, batch_BT1: Tensor | None, step: int, first_sample: int) -> float | None:
        plan = self.stage.plan
        ids, digest = self._forward(batch_BT1, step)
        behind = self.ports.get(plan.index + 1)
        gradient = digest if behind is None else mixed(digest, *(raw_bytes(behind.take()) for _ in behind.incoming))
        if (before := self.ports.get(plan.index - 1)) is not None:
            self._send(before, gradient, ids)
        set_gradients(self.stage, gradient)
        return loss_of(digest) if plan.last else None

    def evaluate(self, batch_BT1: Tensor | None, step: int = 0, first_sample: int = 0, rows: int | None = None) -> list[float]:
        _, digest = self._forward(batch_BT1, step)
        return [loss_of(digest)] if self.stage.plan.last else []

    def _forward(self, batch_BT1: Tensor | None, step: int) -> tuple[Tensor, bytes]:
        """Take what comes from before, calculate for a while, and send on."""
        before, behind = self.ports.get(self.stage.plan.index - 1), self.ports.get(self.stage.plan.index + 1)
        came = [] if before is None else [before.take() for _ in before.incoming]
        ids = batch_BT1 if before is None else came[0]
        assert ids is not None
        self.runtime.sleep(self.slowness())
        digest = digest_of(self.stage, step, ids, came[1:])
        if behind is not None:
            self._send(behind, digest, ids)
        return ids, digest

    @staticmethod
    def _send(port: Port, digest: bytes, ids: Tensor) -> None:
        for slot in port.outgoing:
            port.send(ids if slot.index is None else numbers_of(digest, tuple(slot.spec.shape)))


class SimulatedPipeline(WorkerPipeline):
    """A worker's part of the pipeline with such a stage; `computed` is told of every step that it has its gradients of, `committed` of
    every one that becomes part of the run."""

    def __init__(
        self,
        config: RunConfig,
        index: int,
        device: torch.device,
        known: Known | None = None,
        *,
        runtime: Runtime,
        slowness: Callable[[], float],
        computed: Callable[[int, int], None],
        committed: Callable[[int, int, str, list[Link]], None],
    ) -> None:
        self.runtime, self.slowness, self.computed, self.committed = runtime, slowness, computed, committed
        super().__init__(config, index, device, known)

    def make_stage(self, index: int) -> Any:
        return SimulatedStage(self.config, StagePlan(index, self.config.pipeline.stages, range(index, index + 1)))

    def make_engine(self, stage: Any) -> Any:
        return HashEngine(stage, self.ports, self.runtime, self.slowness)

    @property
    def epoch(self) -> int:
        return self.links.everyone()[0].epoch

    def step(self, batch_BT1: Tensor | None, step: int, first_sample: int) -> float | None:
        loss = super().step(batch_BT1, step, first_sample)
        self.computed(self.epoch, step)
        return loss

    def update_shared(self, step: int, rate_factor: float) -> list[Tensor]:
        """Be the last thing that happens when a step is committed."""
        rotations = super().update_shared(step, rate_factor)
        stage: Any = self.stages[0]
        self.committed(self.epoch, step, stage.content().hex(), self.links.everyone())
        return rotations


def mixed(*parts: bytes) -> bytes:
    return hashlib.sha256(b"/".join(parts)).digest()


def digest_of(stage: SimulatedStage, step: int, ids: Tensor, payload: Iterable[Tensor]) -> bytes:
    """Hash all that a stage's output depends on."""
    return mixed(stage.content(), str(step).encode(), *(raw_bytes(tensor.float()) for tensor in (ids, *payload)))


def loss_of(digest: bytes) -> float:
    return digest[0] / 256


def set_gradients(stage: SimulatedStage, gradient: bytes) -> None:
    for number, parameter in enumerate(stage.parameters()):
        parameter.grad = numbers_of(mixed(gradient, bytes([number])), (WEIGHTS,)) / 100


def numbers_of(digest: bytes, shape: tuple[int, ...]) -> Tensor:
    """Turn a hash into small whole numbers, which every format of the wire can hold."""
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)[: int(np.prod(shape))].reshape(shape).float() - 128


def undisturbed(config: RunConfig) -> dict[tuple[WorkerId, int], str]:
    """Return the weights of every place after every step, computed without any link, as a run commits them to which nothing happens."""
    stages, replicas, data = config.pipeline.stages, range(config.replicas.count), SimulatedData(config)
    grid = [[SimulatedStage(config, StagePlan(index, stages, range(index, index + 1))) for index in range(stages)] for _ in replicas]
    optimizers: list[list[Any]] = [[StageOptimizer(stage, config.train) for stage in row] for row in grid]  # type: ignore[arg-type]
    found = {}
    for step in range(config.train.steps):
        for replica in replicas:
            compute(grid[replica], step, torch.from_numpy(data.batch(step * config.train.batch + replica * config.replica_batch, 1)))
        for copies in zip(*grid, strict=True):
            for parameters in zip(*(stage.parameters() for stage in copies), strict=True):
                mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        squared = 0.0
        for optimizer in reversed(optimizers[0]):
            squared = optimizer.squared_norm() + squared
        for replica in replicas:
            for stage, optimizer in zip(grid[replica], optimizers[replica], strict=True):
                optimizer.step(rate_factor(step, config.train), clip_scale(math.sqrt(squared), config.train.clip))
                found[WorkerId(replica, stage.plan.index), step] = stage.content().hex()
    return found


def compute(stages: list[SimulatedStage], step: int, ids: Tensor) -> None:
    """Set the gradients of one replica's stages."""
    digests: list[bytes] = []
    shape = (1, ids.shape[1] - 1, stages[0].model.width)
    for stage in stages:
        digests.append(digest_of(stage, step, ids, [numbers_of(digests[-1], shape)] if digests else []))
    gradient = digests[-1]
    set_gradients(stages[-1], gradient)
    for stage, digest in reversed(list(zip(stages, digests, strict=True))[:-1]):
        gradient = mixed(digest, raw_bytes(numbers_of(gradient, shape)))
        set_gradients(stage, gradient)


class SimulatedData:
    """Samples that are told apart by their numbers."""

    fingerprint, tokenizer_json, marked = "simulated", None, False

    def __init__(self, config: RunConfig) -> None:
        self.context, self.vocabulary = config.model.context, config.model.vocabulary
        self.train = self.validation = self

    def batch(self, first: int, count: int, step: range | None = None) -> np.ndarray:
        rows = np.arange(first, first + count)[:, None] * 7 + np.arange(self.context + 1)
        return rows % self.vocabulary

    def evenly(self, count: int) -> np.ndarray:
        return self.batch(0, count)
