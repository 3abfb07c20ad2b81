"""torch's pipeline engine, and every private name of it that is used here: there are none in other files (tests/pipeline/test_private.py).

Which releases of torch have these names, and mean the same by them, stands in `util/versions.py`. Import this file on those alone: on
others `pipeline/own_engine.py` runs the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from thinwire.pipeline.engine_module import EngineModule, Payloads, example_inputs, example_payload
from thinwire.pipeline.order import compute_order
from thinwire.pipeline.schedule import ScheduleName

Share = Callable[[Tensor], Tensor]


class StaticStage(PipelineStage):
    """A pipeline stage whose shapes are always the declared ones.

    torch lets the stages vote whether to infer shapes at run time, which would unpickle objects from the neighbour. Both ends derive
    the shapes from the same config, whose hash they compare, so there is nothing to vote about and nothing is sent.
    """

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)


def static_stage(module: EngineModule, payloads: Payloads, batch: int, group: ProcessGroup) -> StaticStage:
    """Wrap a stage with the forms of its inputs and outputs for microbatches of `batch` sequences."""
    plan, device = module.stage.plan, module.device
    inputs = example_inputs(module, payloads, batch)
    loss = torch.zeros((), dtype=module.loss_dtype, device=device, requires_grad=True)
    outputs = (inputs[0], *example_payload(payloads[1], device)) if 1 in payloads else loss
    return StaticStage(module, plan.index, plan.count, device, input_args=inputs, output_args=outputs, group=group)


def make_schedule(name: ScheduleName, stage: PipelineStage, microbatches: int, in_flight: Sequence[int], share: Share):
    """Make the schedule object of one stage; it is dirty after an exception, so make another then."""
    # torch prints the whole schedule for every exception it passes on; that a link has failed is said by the link.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return share(output)  # the stage has computed it; torch wants a target all the same

    if name == "gpipe":
        return ScheduleGPipe(stage, microbatches, loss_fn=loss, scale_grads=False)
    if name == "1f1b":
        return ScheduleInterleaved1F1B([stage], microbatches, loss_fn=loss, scale_grads=False)
    schedule = _PipelineScheduleRuntime([stage], microbatches, loss_fn=loss, scale_grads=False)
    kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
    order: dict[int, list[_Action | None]] = {
        index: [_Action(index, kinds[kind], microbatch) for kind, microbatch in compute_order(depth, microbatches)]
        for index, depth in enumerate(in_flight)
    }
    schedule._prepare_schedule_with_comms(order)
    return schedule


class TorchExecutor:
    """Run one stage's microbatches on torch's engine, over a process group."""

    def __init__(
        self,
        module: EngineModule,
        payloads: Payloads,
        group: ProcessGroup,
        microbatch: int,
        microbatches: int,
        schedule: ScheduleName,
        in_flight: Sequence[int],
        share: Share,
    ) -> None:
        """Make torch's stage and schedule; not one of them can be used again after an exception."""
        self.microbatches = microbatches
        self.schedule = make_schedule(schedule, static_stage(module, payloads, microbatch, group), microbatches, in_flight, share)

    def run(self, batch_BT1: Tensor | None, samples_B: Tensor, learning: bool) -> list[Tensor]:
        """Run every microbatch of a batch; return what the last stage's share of each loss is, on the others nothing."""
        arguments = () if batch_BT1 is None else (batch_BT1,)
        losses: list[Tensor] = []
        run = self.schedule.step if learning else self.schedule.eval
        run(*arguments, samples_B=samples_B, target=torch.zeros(self.microbatches), losses=losses, return_outputs=False)
        return losses
