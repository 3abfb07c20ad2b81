"""A stage as an engine calls it: tensors in, tensors out, shapes known beforehand, ids riding along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.bits.raw import TensorSpec
from thinwire.codecs.base import Codec
from thinwire.config.sections import Dtype
from thinwire.model.ends import Context
from thinwire.model.stage import Stage

IDS_DTYPE = torch.int32
Payloads = Mapping[int, Sequence[TensorSpec]]
"""What crosses the boundaries before (-1) and behind (1) a stage, besides the ids; the first and the last stage have one."""


class EngineModule(nn.Module):
    """Call a stage with the context of each microbatch."""

    def __init__(self, stage: Stage, dtype: Dtype, rows: int | None = None) -> None:
        """Take marked ids of a batch of so many rows, or plain ones."""
        super().__init__()
        self.stage, self.last, self.device, self.loss_dtype = stage, stage.plan.last, stage.device, stage.dtype
        self.step, self.rows = 0, rows
        self.learning = True
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == "bf16")

    @property
    def ids_width(self) -> int:
        """Return how many numbers a sequence's ids take: one more than it has tokens, and one for their marks."""
        return self.stage.model.context + (1 if self.rows is None else 2)

    def forward(self, ids_BT1: Tensor, *payload: Tensor, samples_B: Tensor) -> Tensor | tuple[Tensor, ...]:
        context = Context(self.step, samples_B, self.learning, rows=self.rows)
        with self.autocast:
            output = self.stage(ids_BT1.long(), payload, context)
        # torch compares the strides of what is sent with the declared ones
        return output[0] if self.last else (ids_BT1, *(tensor.contiguous() for tensor in output))


def payloads_of(stage: Stage, codec: Codec, batch: int) -> Payloads:
    """Derive the payloads of a stage from the codec of the model."""
    plan, context = stage.plan, stage.model.context
    cuts = [*([] if plan.first else [(-1, plan.layers.start)]), *([] if plan.last else [(1, plan.layers.stop)])]
    return {side: codec.at(layer).spec(batch, context).tensors for side, layer in cuts}


def example_inputs(module: EngineModule, payloads: Payloads, batch: int) -> tuple[Tensor, ...]:
    """Return tensors of the form a stage receives: ids, and behind the first stage a payload."""
    ids = torch.full((batch, module.ids_width), 0 if module.rows is None else 1, dtype=IDS_DTYPE, device=module.device)
    return (ids, *example_payload(payloads.get(-1, ()), module.device))


def example_payload(specs: Sequence[TensorSpec], device: torch.device) -> tuple[Tensor, ...]:
    """Return tensors of the form of a payload."""
    return tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=device, requires_grad=True) for spec in specs)
