"""A stage as torch's pipeline engine wants it: tensors in, tensors out, shapes known beforehand, ids riding along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

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

    def forward(self, ids_BT1: Tensor, *payload: Tensor, samples_B: Tensor) -> Tensor | tuple[Tensor, ...]:
        context = Context(self.step, samples_B, self.learning, rows=self.rows)
        with self.autocast:
            output = self.stage(ids_BT1.long(), payload, context)
        # torch compares the strides of what is sent with the declared ones
        return output[0] if self.last else (ids_BT1, *(tensor.contiguous() for tensor in output))


class StaticStage(PipelineStage):
    """A pipeline stage whose shapes are always the declared ones.

    torch lets the stages vote whether to infer shapes at run time, which would unpickle objects from the neighbour. Both ends derive
    the shapes from the same config, whose hash they compare, so there is nothing to vote about and nothing is sent.
    """

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)


def payloads_of(stage: Stage, codec: Codec, batch: int) -> Payloads:
    """Derive the payloads of a stage from the codec of the model."""
    plan, context = stage.plan, stage.model.context
    cuts = [*([] if plan.first else [(-1, plan.layers.start)]), *([] if plan.last else [(1, plan.layers.stop)])]
    return {side: codec.at(layer).spec(batch, context).tensors for side, layer in cuts}


def example_inputs(module: EngineModule, payloads: Payloads, batch: int) -> tuple[Tensor, ...]:
    """Return tensors of the form a stage receives: ids, and behind the first stage a payload."""
    width = module.stage.model.context + (1 if module.rows is None else 2)
    ids = torch.full((batch, width), 0 if module.rows is None else 1, dtype=IDS_DTYPE, device=module.device)
    return (ids, *example_payload(payloads.get(-1, ()), module.device))


def example_payload(specs: Sequence[TensorSpec], device: torch.device) -> tuple[Tensor, ...]:
    """Return tensors of the form of a payload."""
    return tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=device, requires_grad=True) for spec in specs)


def static_stage(module: EngineModule, payloads: Payloads, batch: int, group: ProcessGroup) -> StaticStage:
    """Wrap a stage with the forms of its inputs and outputs for microbatches of `batch` sequences."""
    plan, device = module.stage.plan, module.device
    inputs = example_inputs(module, payloads, batch)
    loss = torch.zeros((), dtype=module.loss_dtype, device=device, requires_grad=True)
    outputs = (inputs[0], *example_payload(payloads[1], device)) if 1 in payloads else loss
    return StaticStage(module, plan.index, plan.count, device, input_args=inputs, output_args=outputs, group=group)
