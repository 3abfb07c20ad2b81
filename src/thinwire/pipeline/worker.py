"""This worker's part of the pipeline: one stage over opened links to its neighbours, on one of the two engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.bits.raw import TensorSpec, from_raw_bytes, raw_bytes
from thinwire.config.sections import RunConfig
from thinwire.link.link import Link
from thinwire.link.probe import probe
from thinwire.model.cut import cut_layers
from thinwire.model.stage import Stage, build_stage
from thinwire.pipeline import forms
from thinwire.pipeline.backend import BoundaryForm, Port, boundary_form, boundary_port, open_group
from thinwire.pipeline.control import Control
from thinwire.pipeline.engine import Engine
from thinwire.pipeline.inprocess import build_codec, gradient_of
from thinwire.pipeline.links import Links
from thinwire.pipeline.meter import Traffic
from thinwire.pipeline.outcome import Outcome, of_replica
from thinwire.pipeline.schedule import ScheduleName, depths, within
from thinwire.replicas.allreduce import mean
from thinwire.util.versions import choose_engine

START = -2
"""Number of an outcome that belongs to no step."""
UNKNOWN = Outcome(START, None, 0.0)
"""The timing of one that takes part in a later epoch for the first time: it relies on those who have measured."""
PROBE_BYTES = 64 * 2**10
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Known:
    """What a worker found out in one epoch, and need not in the next."""

    timing: Outcome | None = None
    """What the schedule was made from."""
    boundaries: Mapping[int, BoundaryForm] | None = None
    """What crosses the boundaries of its stage, before (-1) and behind (1) it."""


class WorkerPipeline:
    """Run one stage in step with its neighbours."""

    engine: Engine
    group: Control
    links: Links
    timing: Outcome
    """What the schedule was made from: the slowest link and stage."""

    def __init__(self, config: RunConfig, index: int, device: torch.device, known: Known | None = None) -> None:
        """Make the stage; `open` joins it with the others. `known` is of the epoch before."""
        self.config, self.codec, self.microbatch = config, build_codec(config), config.microbatch
        stage = self.make_stage(index).to(device)
        self.stages = [stage]
        layers, ends = stage.plan.layers, ((-1, stage.entry), (1, stage.exit))
        cuts = {-1: layers.start, 1: layers.stop}
        self.cuts = {side: self.codec.at(cuts[side]).with_end(end) for side, end in ends if end is not None}
        """The codecs of the boundaries before and behind the stage, as its ends use them."""
        self.before = known or Known()
        self.boundaries = self.before.boundaries or self._boundaries()
        self.ports: dict[int, Port] = {}
        """By the number of the neighbour."""
        self.runs = 0
        """How often the engine was started."""
        self.in_flight: list[int] = []
        """Microbatches that each stage of the replica keeps in flight."""
        self.sent_before: dict[int, int] = {}

    def make_stage(self, index: int) -> Stage:
        """Make what is trained here."""
        ranges = cut_layers(self.config.model.layers, self.config.pipeline.stages, self.config.pipeline.split)
        return build_stage(self.config.model, ranges, index, self.codec, self.config.seed, self.config.adapter)

    def make_engine(self, stage: Stage) -> Engine:
        """Make what computes it, over the ports to its neighbours."""
        own = choose_engine(self.config.pipeline.engine, torch.__version__) == "own"
        way = self.ports if own else open_group(stage.plan.index, stage.plan.count, self.ports, stage.device)
        payloads = {side: form.payload for side, form in self.boundaries.items()}
        train, rows = self.config.train, self.config.train.batch if self.config.data.marked else None
        return Engine(stage, payloads, way, self.microbatch, self.config.pipeline.microbatches, train.dtype, rows)

    def _boundaries(self) -> dict[int, BoundaryForm]:
        plan, microbatches, context = self.stages[0].plan, self.config.pipeline.microbatches, self.config.model.context
        sides = [side for side, missing in ((-1, plan.first), (1, plan.last)) if not missing]
        form, data = (self.microbatch, context, microbatches), self.config.data
        ids = {"known_ids": data.everywhere, "marked": data.marked}
        return {side: boundary_form(self.cuts[side], *form, downstream=side > 0, **ids) for side in sides}

    def open(self, links: Links, group: Control, report: Report = lambda event: None) -> None:
        """Join the other stages over the opened links of an epoch: share basis and parameters, and agree on the schedule.

        `report` is told what the line was found to carry.
        """
        (stage,) = self.stages
        index = stage.plan.index
        self.links, self.group = links, group
        self.ports = {
            index + side: boundary_port(link, self.cuts[side], self.boundaries[side])
            for side, link in ((-1, links.left), (1, links.right))
            if link is not None
        }
        self.waits = Traffic([group.meter, *(port.meter for port in self.ports.values())])
        self._share(stage)
        self.engine = self.make_engine(stage)
        self._schedule(links.right, report)

    def _share(self, stage: Stage) -> None:
        """Use the basis that stage 0 made, to the last bit, and the owners' values of what both sides of a boundary use.

        QR differs in its last bits between CPUs. All stages must know the same frozen features.
        """
        basis, owned, copies = stage.stream.basis(), stage.owned(), stage.copies()
        if basis is not None:
            spec = TensorSpec.raw(tuple(basis.shape), basis.dtype)
            data = self.group.basis_downstream(raw_bytes(basis) if stage.plan.first else None)
            stage.stream.adopt(from_raw_bytes(data, spec))
        mine = stage.stream.fingerprint()
        theirs = self.group.announce({"fingerprint": mine} if stage.plan.first else None, forms.FINGERPRINT)["fingerprint"]
        if theirs != mine:
            raise ValueError(
                f"stage {stage.plan.index} does not agree with stage 0 on basis and fixed features; use the same version of thinwire"
            )
        for owner in owned:
            first, *_ = self.group.peers.gather(raw_bytes(owner.weight))  # replica 0's
            owner.weight.data.copy_(from_raw_bytes(first, TensorSpec.raw(tuple(owner.weight.shape), owner.weight.dtype)))
            self.group.send_tensor(self.group.right, raw_bytes(owner.weight))
        for copy in copies:
            copy.weight.data.copy_(self._receive_like(copy.weight.data, self.group.left))

    def _measure_link(self, right: Link | None, report: Report) -> tuple[float, float]:
        """Return how long a payload travels to the next stage, and how long it occupies the line."""
        if right is None:
            return 0.0, 0.0
        rtt, rate = probe(right, burst_bytes=PROBE_BYTES)
        report({"measured": str(right.peer), "rtt": rtt, "mbps": rate * 8e-6})
        leaving = [slot for slot in self.ports[self.stages[0].plan.index + 1].outgoing if not slot.known]
        size = sum(slot.spec.size(slot.direction) * slot.spec.usual for slot in leaving)
        return rtt / 2, size / rate

    def _schedule(self, right: Link | None, report: Report) -> None:
        """Make the schedule, as deep as the slowest link and stage ask for; all stages must agree on it."""
        slowest = self.group.settle(self.before.timing or self._measure(right, report), meeting=False)
        if slowest.turn_seconds == UNKNOWN.turn_seconds:  # nobody remembers: all were replaced
            slowest = self.group.settle(self._measure(right, report), meeting=False)
        self.timing = slowest
        wanted = self.config.pipeline.schedule
        name: ScheduleName = "depth" if wanted == "auto" else wanted
        stages, microbatches = self.stages[0].plan.count, self.config.pipeline.microbatches
        self.in_flight = depths(stages, microbatches, slowest.delay_seconds, slowest.turn_seconds)
        self.engine.rebuild(name, self.in_flight)

    def _measure(self, right: Link | None, report: Report) -> Outcome:
        """Time the link to the next stage and a microbatch of this one."""
        latency, transmission = self._measure_link(right, report)
        # Where the line is slower than the stages it sets the pace: a depth by compute alone would hold the backwards back.
        turn = max(self.engine.measure(), transmission)
        return Outcome(START, None, 0.0, turn_seconds=turn, delay_seconds=latency + transmission)

    def _begin(self, counting: bool, batch_BT1: Tensor | None) -> Tensor | None:
        """Begin a run of the engine; return what it takes from here: the batch, on the first stage."""
        version = self.stages[0].stream.version  # which moves between runs alone
        for port in self.ports.values():
            port.begin(self.runs, version=version, counting=counting, ids=batch_BT1)
        self.runs += 1
        return batch_BT1 if self.stages[0].plan.first else None

    def step(self, batch_BT1: Tensor | None, step: int, first_sample: int) -> float | None:
        """Accumulate this stage's gradients; the last stage returns the batch's mean loss."""
        for link in self.links.replicas.values():
            if link.error is not None:  # one that this step may not need: whoever was replaced there must not wait until one does
                raise link.error
        own = self._begin(True, batch_BT1)
        self._forget_waits()
        return self.engine.step(own, step, first_sample)

    def _forget_waits(self) -> None:
        """Begin to count anew: what start-up or a validation has sent and waited for is not the next step's."""
        self.waits.take_seconds()
        if self.group.peers.count > 1:
            self.group.peers.take_wait()
            self.group.peers.take_sent()
        self.sent_before = {peer: port.link.meter.sent.socket for peer, port in self.ports.items()}

    @torch.no_grad()
    def evaluate(self, batch_BT1: Tensor | None, rows: int, step: int = 0) -> float | None:
        """Return the mean loss of a batch of `rows` sequences, a step's worth at a time; the last part is filled up and not counted."""
        total, size = 0.0, self.config.replica_batch
        for start in range(0, rows, size):
            part = None if batch_BT1 is None else _filled(batch_BT1[start : start + size], size)
            losses = self.engine.evaluate(self._begin(False, part), step, start, rows)
            used = min(size, rows - start) // self.microbatch
            total += sum(losses[:used])
        return total * self.microbatch / rows if self.stages[0].plan.last else None

    def bound_in_flight(self, limits: Sequence[int] | None) -> list[int]:
        """Agree with all stages on the microbatches in flight, at most so many here; return what each stage keeps."""
        everyone = self.group.gather(limits and limits[0], forms.IN_FLIGHT)
        if not any(everyone):  # nobody has a limit
            return self.in_flight
        in_flight = within(self.in_flight, of_replica(everyone, self.group.replica, self.stages[0].plan.count))
        if in_flight != self.in_flight:
            self.in_flight = in_flight
            self.engine.rebuild("depth", in_flight)
        return in_flight

    def figures(self, seconds: float) -> dict[str, float]:
        """Return what there is to tell of the last step: of links the Mbit/s sent to each neighbour, socket bytes counted."""
        index, peers = self.stages[0].plan.index, self.group.peers
        sent: dict[str, float] = {}
        spans = self.waits.take_seconds()
        if peers.count > 1:
            spans["wait_seconds"] += peers.take_wait()
            sent["exchange_bytes"] = peers.take_sent()
        for peer, port in self.ports.items():
            rate = (port.link.meter.sent.socket - self.sent_before[peer]) * 8e-6 / seconds
            sent["left_mbps" if peer < index else "right_mbps"] = rate
        seen = Traffic([self.ports[beside].meter for beside in (index + 1, index - 1) if beside in self.ports][:1])
        size = seen.per_token("forward") + seen.per_token("backward")
        compute = seconds - sum(spans.values())
        return {"bytes_per_token": size, "compute_seconds": compute, **spans, **self.stages[0].figures(), **sent}

    def totals(self) -> list[dict[str, Any]]:
        """Return what this worker reports: the boundary behind its stage is its own, the one before it the previous stage's."""
        behind = self.ports.get(self.stages[0].plan.index + 1)
        links = [link.meter.snapshot() for link in self.links.everyone()]
        return [{"boundary": behind and behind.meter.counts(), "links": links, "exchange": self.group.peers.sent}]

    def update_shared(self, step: int, rate_factor: float) -> list[Tensor]:
        """Change what stages share, if the codec does so after this step; return the rotation to a new basis."""
        moves, shares = self.codec.moves_after(step), self.codec.shares_after(step)
        rotations = self._move_basis() if moves else []
        if shares:
            self._update_copies(rate_factor)
        self.stages[0].commit_ends()
        return rotations

    def _move_basis(self) -> list[Tensor]:
        """Go over to the basis that the last stage proposes."""
        stream = self.stages[0].stream
        basis = stream.basis()
        assert basis is not None
        data = raw_bytes(self.codec.propose_basis(stream)) if self.stages[0].plan.last else None
        spec = TensorSpec.raw(tuple(basis.shape), basis.dtype)
        basis_DK = from_raw_bytes(self.group.basis_upstream(data), spec).to(basis.device)
        return [stream.go_over(basis_DK, stream.version + 1)]

    def _update_copies(self, rate_factor: float) -> None:
        """Send the copies' gradients upstream, update what is owned here, and take the copies' new values.

        Whatever the exchange, replicas average these gradients: parameters on a manifold cannot be averaged afterwards.
        """
        (stage,) = self.stages
        copies, owned = stage.copies(), stage.owned()
        for copy in copies:
            self.group.send_tensor(self.group.left, raw_bytes(gradient_of(copy)))
        for owner in owned:
            gradient = gradient_of(owner)
            gradient += self._receive_like(gradient, self.group.right)
            (gradient,) = mean(self.group.peers, [gradient])
            owner.update(gradient, rate_factor)
            self.group.send_tensor(self.group.right, raw_bytes(owner.weight))
            meter = self.ports[stage.plan.index + 1].meter
            meter.forward += gradient.nbytes
            meter.backward += gradient.nbytes
        for copy in copies:
            copy.weight.data.copy_(self._receive_like(copy.weight.data, self.group.left))

    def _receive_like(self, tensor: Tensor, link: Link | None) -> Tensor:
        data = self.group.receive_tensor(link)
        return from_raw_bytes(data, TensorSpec.raw(tuple(tensor.shape), tensor.dtype)).to(tensor.device)


def _filled(batch_BT1: Tensor, size: int) -> Tensor:
    """Repeat the last row until the batch has `size` rows."""
    missing = size - len(batch_BT1)
    return torch.cat((batch_BT1, batch_BT1[-1:].expand(missing, -1))) if missing else batch_BT1
