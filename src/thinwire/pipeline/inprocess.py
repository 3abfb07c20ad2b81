"""All stages in one process, with real ends and bytes at every boundary: it trains, evaluates and counts.

It is the oracle for engines that run stages elsewhere: per microbatch the forward and backward of every stage in turn, gradients
accumulated in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs.base import DTYPES, Codec
from thinwire.codecs.build import make_codec
from thinwire.config.sections import Dtype, RunConfig
from thinwire.model.cut import cut_layers
from thinwire.model.ends import Context, Shared
from thinwire.model.stage import Stage, build_stages
from thinwire.pipeline.boundary import Boundary
from thinwire.pipeline.meter import Traffic
from thinwire.util.device import to_device


def build_codec(config: RunConfig) -> Codec:
    """Make the codec that a config describes."""
    compute = torch.float32 if config.train.dtype == "bf16" else DTYPES[config.train.dtype]
    return make_codec(config.codec, config.model, seed=config.seed, compute=compute)


def build_pipeline(config: RunConfig, device: torch.device) -> Pipeline:
    """Make the codec, the stages and their boundaries that a config describes."""
    codec = build_codec(config)
    ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    stages = [stage.to(device) for stage in build_stages(config.model, ranges, codec, config.seed, config.adapter)]
    form, data = (config.microbatch, config.model.context, config.train.dtype), config.data
    return Pipeline(stages, codec, *form, known_ids=data.everywhere, marked=data.marked)


def ends_between(before: Stage, behind: Stage) -> tuple[nn.Module, nn.Module]:
    """Return the exit of a stage and the entry of the next."""
    assert before.exit is not None and behind.entry is not None
    return before.exit, behind.entry


def gradient_of(shared: Shared) -> Tensor:
    """Return one side's gradient of a shared parameter."""
    gradient = shared.weight.grad
    return torch.zeros_like(shared.weight.data) if gradient is None else gradient.clone()


class Pipeline:
    """Run microbatches through the stages and their boundaries."""

    def __init__(
        self,
        stages: list[Stage],
        codec: Codec,
        microbatch: int,
        time: int,
        dtype: Dtype = "fp32",
        *,
        known_ids: bool = False,
        marked: bool = False,
    ) -> None:
        if len({stage.stream.fingerprint() for stage in stages}) != 1:
            raise ValueError("the stages do not agree on basis and fixed features; start them from the same seed and settings")
        self.stages = stages
        self.codec = codec
        self.microbatch = microbatch
        self.marked = marked
        ids = {"known_ids": known_ids, "marked": marked}
        self.boundaries = [
            Boundary(codec.at(behind.plan.layers.start), microbatch, time, ends_between(before, behind), **ids)
            for before, behind in pairwise(stages)
        ]
        self.traffic = Traffic([boundary.meter for boundary in self.boundaries])
        self.device = stages[0].device
        self.in_flight = [1] * len(stages)
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == "bf16")

    def step(self, batch_BT1: Tensor | None, step: int, first_sample: int) -> float:
        """Accumulate the gradients of the batch's mean loss; return that loss."""
        assert batch_BT1 is not None
        self.traffic.take_seconds()
        losses = [self._train(ids, context, len(batch_BT1)) for ids, context in self._microbatches(batch_BT1, step, first_sample, True)]
        return sum(torch.stack(losses).tolist())

    def update_shared(self, step: int, rate_factor: float) -> list[Tensor]:
        """Change what stages share, if the codec does so after this step; return their rotations to a new basis."""
        moves, shares = self.codec.moves_after(step), self.codec.shares_after(step)
        rotations = self._move_basis() if moves else []
        if shares:
            self._update_copies(rate_factor)
        for stage in self.stages:
            stage.commit_ends()
        return rotations

    def _move_basis(self) -> list[Tensor]:
        """Let all stages go over to the basis that the last one proposes."""
        basis_DK = self.codec.propose_basis(self.stages[-1].stream)
        return [stage.stream.go_over(basis_DK, stage.stream.version + 1) for stage in self.stages]

    def _update_copies(self, rate_factor: float) -> None:
        """Update what both sides of a boundary share with the sum of their gradients."""
        for boundary, before, behind in zip(self.boundaries, self.stages, self.stages[1:], strict=False):
            for owner, copy in zip(before.owned(), behind.copies(), strict=True):
                gradient = gradient_of(owner)
                gradient += gradient_of(copy)
                owner.update(gradient, rate_factor)
                copy.weight.data.copy_(owner.weight.data)
                boundary.meter.forward += gradient.nbytes
                boundary.meter.backward += gradient.nbytes

    def bound_in_flight(self, limits: Sequence[int] | None) -> list[int]:
        """Return how many microbatches each stage keeps in flight: they go through one at a time."""
        return self.in_flight

    def figures(self, seconds: float) -> dict[str, float]:
        """Return what there is to tell of the last step."""
        return self.traffic.figures(seconds) | {name: value for stage in self.stages for name, value in stage.figures().items()}

    def totals(self) -> list[dict[str, Any]]:
        """Return what has crossed the boundary behind each stage."""
        counts = [boundary.meter.counts() for boundary in self.boundaries]
        return [{"boundary": each, "links": [], "exchange": 0} for each in (*counts, None)]

    @torch.no_grad()
    def evaluate(self, batch_BT1: Tensor | None, rows: int | None = None, step: int = 0) -> float:
        """Return the mean loss of a batch of `rows` sequences (all of them) after so many steps, boundaries included, bytes not counted."""
        assert batch_BT1 is not None and rows in (None, len(batch_BT1))
        found = [(self._forward(ids, context)[0], len(ids)) for ids, context in self._microbatches(batch_BT1, step, 0, False)]
        losses = torch.stack([loss for loss, _ in found]).tolist()
        return sum(loss * count / len(batch_BT1) for loss, (_, count) in zip(losses, found, strict=True))

    def _microbatches(self, batch_BT1: Tensor, step: int, first_sample: int, training: bool):
        samples = torch.arange(first_sample, first_sample + len(batch_BT1), device=self.device)
        whole = len(batch_BT1) if self.marked else None
        for start in range(0, len(batch_BT1), self.microbatch):
            rows = slice(start, start + self.microbatch)
            yield batch_BT1[rows].to(self.device), Context(step, samples[rows], training, rows=whole)

    def _train(self, ids_BT1: Tensor, context: Context, batch: int) -> Tensor:
        loss, sent, received = self._forward(ids_BT1, context)
        share = loss * (len(ids_BT1) / batch)
        share.backward()
        for index in range(len(self.boundaries) - 1, -1, -1):
            boundary, version = self.boundaries[index], self.stages[index].stream.version
            packed = boundary.pack([tensor.grad for tensor in received[index]], "backward", self.stages[index + 1].stream.version)
            boundary.count(packed, "backward")
            gradients = [to_device(gradient, self.device) for gradient in boundary.unpack(packed, "backward", version)]
            torch.autograd.backward(sent[index], gradients)
        return share.detach()

    def _forward(self, ids_BT1: Tensor, context: Context):
        """Return the loss, and per boundary the payload as sent and as received."""
        payload: tuple[Tensor, ...] = ()
        sent, received = [], []
        for index, stage in enumerate(self.stages):
            with self.autocast:
                payload = stage(ids_BT1, payload, context)
            if index == len(self.boundaries):
                break
            boundary = self.boundaries[index]
            packed = boundary.pack(payload, "forward", stage.stream.version, ids_BT1)
            if context.training:
                boundary.count(packed, "forward")
            sent.append(payload)
            if not boundary.ids_slot.known:
                ids_BT1 = boundary.unpack_ids(packed).to(self.device)
            unpacked = boundary.unpack(packed, "forward", self.stages[index + 1].stream.version)
            payload = tuple(to_device(tensor, self.device).requires_grad_(context.training) for tensor in unpacked)
            received.append(payload)
        return payload[0], sent, received
