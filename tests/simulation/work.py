"""A stage that is cheap to train: its gradients are hashes of everything that they depend on, so no mistake before a step goes unseen.

Links, ports, control, optimizer, checkpoints and the loop are the real ones; only what torch's engine computes is replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.bits.raw import raw_bytes
from thinwire.config.sections import RunConfig
from thinwire.model.cut import StagePlan
from thinwire.pipeline.backend import Port
from thinwire.pipeline.boundary import Slot
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
        self.layers = nn.ModuleDict({str(layer): Cell(layer) for layer in plan.layers})
        self.stream = SimpleNamespace(version=0, basis=lambda: None, fingerprint=lambda: "simulated")
        self.architecture = SimpleNamespace(count=lambda model, layers: WEIGHTS * layers)

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def owned(self) -> list[Any]:
        return []

    def copies(self) -> list[Any]:
        return []

    def drop_shared_gradients(self) -> None:
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
        gradient = digest if behind is None else mixed(digest, *self._receive(behind))
        if (before := self.ports.get(plan.index - 1)) is not None:
            self._send(before, gradient, ids)
        for number, parameter in enumerate(self.stage.parameters()):
            parameter.grad = numbers_of(mixed(gradient, bytes([number])), (WEIGHTS,), torch.float32) / 100
        return digest[0] / 256 if plan.last else None

    def evaluate(self, batch_BT1: Tensor | None, step: int = 0, first_sample: int = 0) -> list[float]:
        _, digest = self._forward(batch_BT1, step)
        return [digest[0] / 256] if self.stage.plan.last else []

    def _forward(self, batch_BT1: Tensor | None, step: int) -> tuple[Tensor, bytes]:
        """Take what comes from before, calculate for a while, and send on."""
        before, behind = self.ports.get(self.stage.plan.index - 1), self.ports.get(self.stage.plan.index + 1)
        came = [] if before is None else [before.take() for _ in before.incoming]
        ids = batch_BT1 if before is None else came[0]
        assert ids is not None
        self.runtime.sleep(self.slowness())
        digest = mixed(self.stage.content(), str(step).encode(), *(raw_bytes(tensor.float()) for tensor in (ids, *came[1:])))
        if behind is not None:
            self._send(behind, digest, ids)
        return ids, digest

    def _receive(self, port: Port) -> list[bytes]:
        return [raw_bytes(port.take()) for _ in port.incoming]

    @staticmethod
    def _send(port: Port, digest: bytes, ids: Tensor) -> None:
        for slot in port.outgoing:
            port.send(ids if slot.index is None else payload_of(digest, slot))


class SimulatedPipeline(WorkerPipeline):
    """A worker's part of the pipeline with such a stage; `committed` is told of every step that becomes part of the run."""

    def __init__(
        self,
        config: RunConfig,
        index: int,
        device: torch.device,
        known: Known | None = None,
        *,
        runtime: Runtime,
        slowness: Callable[[], float],
        committed: Any,
    ) -> None:
        self.runtime, self.slowness, self.committed = runtime, slowness, committed
        super().__init__(config, index, device, known)

    def make_stage(self, index: int) -> Any:
        return SimulatedStage(self.config, StagePlan(index, self.config.pipeline.stages, range(index, index + 1)))

    def make_engine(self, stage: Any) -> Any:
        return HashEngine(stage, self.ports, self.runtime, self.slowness)

    def update_shared(self, step: int, rate_factor: float) -> list[Tensor]:
        """Be the last thing that happens when a step is committed."""
        rotations = super().update_shared(step, rate_factor)
        (stage,) = self.stages
        self.committed(self.links.everyone()[0].epoch, step, stage.content().hex())  # type: ignore[operator]
        return rotations


def mixed(*parts: bytes) -> bytes:
    return hashlib.sha256(b"/".join(parts)).digest()


def numbers_of(digest: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Turn a hash into small whole numbers, which every format of the wire can hold."""
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)[: int(np.prod(shape))].reshape(shape).to(dtype) - 128


def payload_of(digest: bytes, slot: Slot) -> Tensor:
    return numbers_of(digest, tuple(slot.spec.shape), torch.float32)


class SimulatedData:
    """Samples that are told apart by their numbers."""

    fingerprint, tokenizer_json = "simulated", None

    def __init__(self, context: int, vocabulary: int) -> None:
        self.context, self.vocabulary = context, vocabulary
        self.train = self.validation = self

    def batch(self, first: int, count: int) -> np.ndarray:
        rows = np.arange(first, first + count)[:, None] * 7 + np.arange(self.context + 1)
        return rows % self.vocabulary

    def evenly(self, count: int) -> np.ndarray:
        return self.batch(0, count)
