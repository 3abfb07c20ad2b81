"""One stage in its own process on torch's pipeline engine; its neighbours are reached through a process group.

It computes what the in-process `Pipeline` computes: that one is the oracle in the tests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire.config.sections import Dtype
from thinwire.model.stage import Stage
from thinwire.pipeline.schedule import ScheduleName, make_schedule
from thinwire.pipeline.static_stage import IDS_DTYPE, EngineModule, Payloads, example_inputs, static_stage


class Engine:
    """Run this worker's part of every step."""

    def __init__(
        self,
        stage: Stage,
        payloads: Payloads,
        group: ProcessGroup,
        microbatch: int,
        microbatches: int,
        dtype: Dtype = "fp32",
        rows: int | None = None,
    ) -> None:
        """Run microbatches of so many sequences, with these payloads at the boundaries of the stage.

        `rows` are those of a step's whole batch, over all replicas, if ids are marked (`bits/targets.py`).
        """
        self.stage, self.payloads, self.group = stage, payloads, group
        self.microbatch, self.microbatches = microbatch, microbatches
        self.rows = rows
        self.module = EngineModule(stage, dtype, rows)
        self.device = self.module.device
        self.batch = microbatch * microbatches

    def rebuild(self, schedule: ScheduleName, in_flight: Sequence[int]) -> None:
        """Make stage and schedule objects anew; needed at the start and after any exception."""
        wrapped = static_stage(self.module, self.payloads, self.microbatch, self.group)
        self.schedule = make_schedule(schedule, wrapped, self.microbatches, in_flight, self._share)

    def measure(self) -> float:
        """Return the seconds of forward and backward of one microbatch, the second time it runs; leave no gradient behind."""
        self.module.learning = False  # the state of codecs must not learn from examples
        for _ in range(2):
            ids, *payload = example_inputs(self.module, self.payloads, self.microbatch)
            started = time.perf_counter()
            samples_B = torch.arange(self.microbatch, device=self.device)
            output = self.module(ids, *payload, samples_B=samples_B)
            tensors = [output] if isinstance(output, Tensor) else [tensor for tensor in output if tensor.requires_grad]
            torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])
            seconds = time.perf_counter() - started
        self.stage.zero_grad(set_to_none=True)
        return seconds

    def _share(self, loss: Tensor, target: Tensor) -> Tensor:
        """Return a microbatch's share of the step's mean loss."""
        return loss * (self.microbatch / self.batch)

    def step(self, batch_BT1: Tensor | None, step: int, first_sample: int) -> float | None:
        """Accumulate this stage's gradients of the batch's mean loss; the last stage returns the loss, the others None."""
        self.module.rows = self.rows
        losses = self._run(batch_BT1, step, first_sample, learning=True)
        return sum(float(loss.detach()) for loss in losses) if self.module.last else None

    @torch.no_grad()
    def evaluate(self, batch_BT1: Tensor | None, step: int = 0, first_sample: int = 0, rows: int | None = None) -> list[float]:
        """Return the mean loss of each microbatch on the last stage, nothing on the others; it may be part of a batch of `rows`."""
        self.module.rows = None if self.rows is None else rows or self.batch
        losses = self._run(batch_BT1, step, first_sample, learning=False)
        return [float(loss) * self.microbatches for loss in losses]

    def _run(self, batch_BT1: Tensor | None, step: int, first_sample: int, learning: bool) -> list[Tensor]:
        self.module.step, self.module.learning = step, learning
        samples_B = torch.arange(first_sample, first_sample + self.batch, device=self.device)
        arguments = () if batch_BT1 is None else (batch_BT1.to(self.device, IDS_DTYPE),)
        losses: list[Tensor] = []
        run = self.schedule.step if learning else self.schedule.eval
        try:
            # The loss is computed inside the last stage; torch wants a target all the same.
            run(*arguments, samples_B=samples_B, target=torch.zeros(self.microbatches), losses=losses, return_outputs=False)
        except RuntimeError:
            if self.stage.runner.problem is not None:  # torch has put it into a listing of all tensors
                raise self.stage.runner.problem from None
            raise
        return losses
