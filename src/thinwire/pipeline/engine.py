"""One stage in its own process, on torch's pipeline engine or on our own; its neighbours are reached through ports.

It computes what the in-process `Pipeline` computes: that one is the oracle in the tests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire.config.sections import Dtype
from thinwire.model.stage import Stage
from thinwire.pipeline.backend import Port
from thinwire.pipeline.engine_module import IDS_DTYPE, EngineModule, Payloads, example_inputs
from thinwire.pipeline.order import compute_order, fixed_depth
from thinwire.pipeline.own_engine import OwnExecutor
from thinwire.pipeline.schedule import ScheduleName
from thinwire.util.device import synchronize

if TYPE_CHECKING:
    from thinwire.pipeline.torch_engine import TorchExecutor


class Engine:
    """Run this worker's part of every step."""

    executor: TorchExecutor | OwnExecutor
    """Runs every microbatch of a batch, with its backward if it is to learn: whoever does it, to the same bits."""

    def __init__(
        self,
        stage: Stage,
        payloads: Payloads,
        way: ProcessGroup | Mapping[int, Port],
        microbatch: int,
        microbatches: int,
        dtype: Dtype = "fp32",
        rows: int | None = None,
    ) -> None:
        """Run microbatches of so many sequences, with these payloads at the boundaries of the stage.

        The way to the neighbours decides who runs them: torch's engine over a process group, our own over ports.
        `rows` are those of a step's whole batch, over all replicas, if ids are marked (`bits/marks.py`).
        """
        self.stage, self.payloads, self.way = stage, payloads, way
        self.microbatch, self.microbatches = microbatch, microbatches
        self.rows = rows
        self.module = EngineModule(stage, dtype, rows)
        self.device = self.module.device
        self.batch = microbatch * microbatches

    def rebuild(self, schedule: ScheduleName, in_flight: Sequence[int]) -> None:
        """Make what runs the schedule anew; needed at the start and after any exception."""
        if not isinstance(self.way, Mapping):
            # Not at the top: it takes as long to import as torch itself, and only workers need it; they are forked from what has it.
            from thinwire.pipeline.torch_engine import TorchExecutor

            form = self.microbatch, self.microbatches, schedule, in_flight
            self.executor = TorchExecutor(self.module, self.payloads, self.way, *form, self._share)
            return
        plan = self.stage.plan
        depth = fixed_depth(schedule, plan.index, plan.count, self.microbatches) or in_flight[plan.index]
        actions = compute_order(depth, self.microbatches)
        self.executor = OwnExecutor(self.module, self.way, self.microbatch, actions, self._share)

    def measure(self) -> float:
        """Return the seconds of forward and backward of one microbatch, the second time it runs; leave no gradient behind."""
        self.module.learning = False  # the state of codecs must not learn from examples
        for _ in range(2):
            ids, *payload = example_inputs(self.module, self.payloads, self.microbatch)
            synchronize(self.device)  # a card is told to compute, and does it later
            started = time.perf_counter()
            samples_B = torch.arange(self.microbatch, device=self.device)
            output = self.module(ids, *payload, samples_B=samples_B)
            tensors = [output] if isinstance(output, Tensor) else [tensor for tensor in output if tensor.requires_grad]
            torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])
            synchronize(self.device)
            seconds = time.perf_counter() - started
        self.stage.zero_grad(set_to_none=True)
        return seconds

    def _share(self, loss: Tensor) -> Tensor:
        """Return a microbatch's share of the step's mean loss."""
        return loss * (self.microbatch / self.batch)

    def step(self, batch_BT1: Tensor | None, step: int, first_sample: int) -> float | None:
        """Accumulate this stage's gradients of the batch's mean loss; the last stage returns the loss, the others None."""
        self.module.rows = self.rows
        losses = self._run(batch_BT1, step, first_sample, learning=True)
        return sum(losses) if self.module.last else None

    @torch.no_grad()
    def evaluate(self, batch_BT1: Tensor | None, step: int = 0, first_sample: int = 0, rows: int | None = None) -> list[float]:
        """Return the mean loss of each microbatch on the last stage, nothing on the others; it may be part of a batch of `rows`."""
        self.module.rows = None if self.rows is None else rows or self.batch
        return [loss * self.microbatches for loss in self._run(batch_BT1, step, first_sample, learning=False)]

    def _run(self, batch_BT1: Tensor | None, step: int, first_sample: int, learning: bool) -> list[float]:
        """Return each microbatch's share of the loss on the last stage, copied from the device at once; nothing on the others."""
        self.module.step, self.module.learning = step, learning
        samples_B = torch.arange(first_sample, first_sample + self.batch, device=self.device)
        ids_BT1 = None if batch_BT1 is None else batch_BT1.to(self.device, IDS_DTYPE)
        try:
            losses = self.executor.run(ids_BT1, samples_B, learning)
        except RuntimeError:
            if self.stage.runner.problem is not None:  # torch has put it into a listing of all tensors
                raise self.stage.runner.problem from None
            raise
        return torch.stack(losses).tolist() if losses else []
