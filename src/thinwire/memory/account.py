"""Where the memory of a stage goes, by kind: what is always there, what a microbatch in flight adds at the wire, what an update takes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.codecs.base import Codec, WireSpec
from thinwire.config.sections import RunConfig, TrainConfig
from thinwire.memory.offload import worth_moving
from thinwire.memory.slow_memory import CHUNK
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.util.versions import choose_engine

IDS_BYTES = 4
"""Bytes of an id as an engine holds it."""


@dataclass(frozen=True)
class WireBuffers:
    """Buffers of a stage's boundaries."""

    fixed_bytes: int
    """Made once for all microbatches of a step."""
    flight_bytes: int
    """Held for each microbatch in flight."""


def tensor_bytes(tensors: list[Tensor]) -> int:
    """Add up tensors, each storage once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def trained_bytes(stage: Stage) -> int:
    """Add up the parameters of a stage that have gradients: all, but for the base of an adapter."""
    return tensor_bytes([parameter for name, parameter in stage.named_parameters() if name not in stage.frozen])


def wire_of(stage: Stage, codec: Codec, config: RunConfig) -> WireBuffers:
    """Return what the boundaries of a stage hold: payloads in the graph's form, and their bytes on the way."""
    microbatches, plan = config.pipeline.microbatches, stage.plan
    form = config.replica_batch // microbatches, config.model.context
    ids = form[0] * (form[1] + 1) * IDS_BYTES
    before = None if plan.first else codec.at(plan.layers.start).spec(*form)
    behind = None if plan.last else codec.at(plan.layers.stop).spec(*form)
    received = graph_bytes(before) + ids if before else 0
    sent = graph_bytes(behind) if behind else 0
    packed = sum(packed_bytes(spec) for spec in (before, behind) if spec)
    if config.pipeline.mode == "inprocess":
        return WireBuffers(0, received + sent + packed)
    if choose_engine(config.pipeline.engine, torch.__version__) == "own":  # it holds what it has received until the backward
        return WireBuffers(sent, received + sent + packed)
    # torch's engine makes a buffer for every microbatch of a step that comes in, and one for every gradient.
    return WireBuffers(microbatches * (received + sent), sent + packed)


def graph_bytes(spec: WireSpec) -> int:
    """Return the bytes of a payload as tensors."""
    return sum(tensor.dtype.itemsize * math.prod(tensor.shape) for tensor in spec.tensors)


def packed_bytes(spec: WireSpec) -> int:
    """Return the bytes of a payload and of its gradient on the wire."""
    return sum(tensor.forward_bytes + tensor.backward_bytes for tensor in spec.tensors)


def always_there(stage: Stage, codec: Codec, config: RunConfig) -> dict[str, int]:
    """Return by kind what a stage holds during the whole of a step."""
    parameters = trained_bytes(stage)
    return {
        **({"frozen base": tensor_bytes(list(stage.parameters())) - parameters} if stage.frozen else {}),
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": sum(map(sum, StageOptimizer(stage, config.train).state_sizes())),
        "basis and fixed table": tensor_bytes(list(stage.buffers())),
        "wire buffers": wire_of(stage, codec, config).fixed_bytes,
    }


def between_steps(stage: Stage, train: TrainConfig, kinds: Mapping[str, int]) -> tuple[int, int]:
    """Return the most that is there with optimizer state in memory, and with it in slow memory; `kinds` are what is always there."""
    rest = sum(kinds.values()) - kinds["working memory"]
    scratch, states = scratch_bytes(stage, train), StageOptimizer(stage, train).state_sizes()
    one_by_one = max((mine + sum(worth_moving([sizes])) for mine, sizes in zip(scratch, states, strict=True)), default=0)
    saving = rest - kinds["gradients"]  # a checkpoint wants all state at once, when the gradients are gone
    return rest + max(scratch, default=0), max(saving, rest - sum(worth_moving(states)) + one_by_one + CHUNK)


def scratch_bytes(stage: Stage, train: TrainConfig) -> list[int]:
    """Return for each parameter the temporary tensors of its update, found by updating one like it; in the order of `state_sizes`."""
    found: list[int] = []
    known: dict[tuple[object, ...], int] = {}
    for optimizer in StageOptimizer(stage, train).optimizers:
        for group in optimizer.param_groups:
            (parameter,) = group["params"]
            form = type(optimizer), parameter.shape, group.get("axis")
            if form not in known:
                known[form] = scratch_of(optimizer, group, parameter)
            found.append(known[form])
    return found


def scratch_of(optimizer: torch.optim.Optimizer, group: dict, parameter: nn.Parameter) -> int:
    """Update a parameter of the same shape twice: the first time makes its state, the second shows what else it takes."""
    twin = nn.Parameter(torch.zeros_like(parameter))
    twin.grad = twin.detach()  # zeros that stay zeros: no room for a gradient is needed
    groups, optimizer.param_groups = optimizer.param_groups, [group | {"params": [twin]}]
    try:
        optimizer.step()
        with Live([twin, *optimizer.state[twin].values()]) as live:
            optimizer.step()
    finally:
        optimizer.param_groups = groups
        optimizer.state.clear()
    return live.peak


class Live(TorchDispatchMode):
    """Count the storages that were made in this context and are still alive."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Leave out the storages that were there before: `known` tensors, which operations may return."""
        super().__init__()
        self.bytes = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), named: dict[str, Any] | None = None) -> Any:
        result = operation(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        number, size = storage._cdata, storage.nbytes()
        if number in self._known or size == 0:
            return
        self._known.add(number)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._gone, number, size)

    def _gone(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.bytes -= size
