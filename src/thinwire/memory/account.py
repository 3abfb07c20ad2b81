"""Where the memory of a stage goes, by kind: what is always there, and what each microbatch in flight adds on the wire's side."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from thinwire.codecs.base import Codec, WireSpec
from thinwire.config.sections import RunConfig
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer

IDS_BYTES = 4
"""Bytes of an id as torch's engine holds it."""


@dataclass(frozen=True)
class Wire:
    """Buffers of a stage's boundaries."""

    fixed_bytes: int
    """Made once for all microbatches of a step."""
    flight_bytes: int
    """Held for each microbatch in flight."""


def tensor_bytes(tensors: list[Tensor]) -> int:
    """Add up tensors, each storage once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def wire_of(stage: Stage, codec: Codec, config: RunConfig) -> Wire:
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
        return Wire(0, received + sent + packed)
    # torch's engine makes a buffer for every microbatch of a step that comes in, and one for every gradient.
    return Wire(microbatches * (received + sent), sent + packed)


def graph_bytes(spec: WireSpec) -> int:
    """Return the bytes of a payload as tensors."""
    return sum(tensor.dtype.itemsize * math.prod(tensor.shape) for tensor in spec.tensors)


def packed_bytes(spec: WireSpec) -> int:
    """Return the bytes of a payload and of its gradient on the wire."""
    return sum(tensor.forward_bytes + tensor.backward_bytes for tensor in spec.tensors)


def always_there(stage: Stage, codec: Codec, config: RunConfig) -> dict[str, int]:
    """Return by kind what a stage holds during the whole of a step."""
    parameters = tensor_bytes(list(stage.parameters()))
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": sum(map(sum, StageOptimizer(stage, config.train).state_sizes())),
        "basis and fixed table": tensor_bytes(list(stage.buffers())),
        "wire buffers": wire_of(stage, codec, config).fixed_bytes,
    }
