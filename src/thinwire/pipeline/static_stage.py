"""A stage as torch's pipeline engine wants it: tensors in, tensors out, shapes known beforehand, ids riding along."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from thinwire.codecs.base import Codec
from thinwire.config.sections import Dtype
from thinwire.model.ends import Context
from thinwire.model.stage import Stage

IDS_DTYPE = torch.int32


class EngineModule(nn.Module):
    """Call a stage with the context of each microbatch."""

    def __init__(self, stage: Stage, dtype: Dtype) -> None:
        super().__init__()
        self.stage, self.last = stage, stage.plan.last
        self.step = 0
        self.learning = True
        self.autocast = torch.autocast(stage.device.type, torch.bfloat16, enabled=dtype == "bf16")

    def forward(self, ids_BT1: Tensor, *payload: Tensor, samples_B: Tensor) -> Tensor | tuple[Tensor, ...]:
        context = Context(self.step, samples_B, self.learning)
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


def example_inputs(module: EngineModule, codec: Codec, batch: int) -> tuple[Tensor, ...]:
    """Return tensors of the form a stage receives: ids, and behind the first stage a payload."""
    plan, model, device = module.stage.plan, module.stage.model, module.stage.device
    ids = torch.zeros(batch, model.context + 1, dtype=IDS_DTYPE, device=device)
    return (ids,) if plan.first else (ids, *example_payload(codec.at(plan.layers.start), batch, device))


def example_payload(codec: Codec, batch: int, device: torch.device) -> tuple[Tensor, ...]:
    specs = codec.spec(batch, codec.model.context).tensors
    return tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=device, requires_grad=True) for spec in specs)


def static_stage(module: EngineModule, codec: Codec, batch: int, group: ProcessGroup) -> StaticStage:
    """Wrap a stage with the forms of its inputs and outputs for microbatches of `batch` sequences."""
    plan, device = module.stage.plan, module.stage.device
    inputs = example_inputs(module, codec, batch)
    loss = torch.zeros((), dtype=module.stage.dtype, device=device, requires_grad=True)
    outputs = loss if plan.last else (inputs[0], *example_payload(codec.at(plan.layers.stop), batch, device))
    return StaticStage(module, plan.index, plan.count, device, input_args=inputs, output_args=outputs, group=group)
