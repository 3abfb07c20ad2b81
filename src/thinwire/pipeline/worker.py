"""This worker's part of the pipeline: one stage, the links to its neighbours, torch's engine. The same surface as `Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.bits.raw import TensorSpec, from_raw_bytes, raw_bytes
from thinwire.config.sections import ModelConfig, RunConfig
from thinwire.link.errors import ProtocolError
from thinwire.link.link import Link
from thinwire.link.message import ANY, FLAG, Form, optional, whole
from thinwire.link.probe import probe
from thinwire.model.cut import cut_layers
from thinwire.model.stage import Stage, build_stage
from thinwire.pipeline import forms
from thinwire.pipeline.backend import boundary_contract, boundary_port, open_group
from thinwire.pipeline.backups import Copies
from thinwire.pipeline.engine import Engine
from thinwire.pipeline.inprocess import build_codec, gradient_of
from thinwire.pipeline.meter import Traffic
from thinwire.pipeline.neighbours import Links, Neighbours
from thinwire.pipeline.outcome import Outcome, of_replica
from thinwire.pipeline.replica_links import exchange_contract, join_control, join_peers
from thinwire.pipeline.schedule import ScheduleName, depths, within
from thinwire.replicas.allreduce import mean

START, EVALUATION = -2, -1
"""Numbers of outcomes that belong to no step."""
UNKNOWN = Outcome(START, None, 0.0)
"""The timing of one that takes part in a later epoch for the first time: it relies on those who have measured."""
PROBE_BYTES = 64 * 2**10


class WorkerPipeline:
    """Run one stage in step with its neighbours."""

    def __init__(
        self,
        config: RunConfig,
        index: int,
        neighbours: Neighbours,
        device: torch.device,
        *,
        epoch: int = 0,
        timing: Outcome | None = None,
        copies: Path | None = None,
    ) -> None:
        """Open the links of an epoch and get the stage ready.

        `timing` is what the schedule was made from in the epoch before; `copies` the run folder, where neighbours keep each other's
        checkpoints.
        """
        self.config, self.neighbours, self.replica = config, neighbours, neighbours.worker_id.replica
        self.number = self.replica * config.pipeline.stages + index
        self.codec = build_codec(config)
        ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
        stage: Stage = build_stage(config.model, ranges, index, self.codec, config.seed).to(device)
        self.stages = [stage]
        self.microbatch = config.microbatch
        links = self._open_links(stage, epoch)
        self.peers = join_peers(config, self.replica, links, stage)
        self.control = join_control(links, self.peers.graph, self.replica)
        # The boundary behind this stage is this worker's to report; the one before it is the previous stage's.
        self.traffic = Traffic([self.ports[index + 1].meter] if links.right else [])
        beside = index + 1 if links.right else index - 1
        self.seen = Traffic([self.ports[beside].meter] if beside in self.ports else [])
        """What people see of a stage: the boundary behind it, or before the last one."""
        self.waits = Traffic([self.control.meter, *(port.meter for port in self.ports.values())])
        largest = largest_part(config.model, stage)
        self.copies = Copies(copies, index, len(ranges), links.left, links.right, largest) if copies else None
        self._share_basis(stage)
        self._share_copies(stage)
        group = open_group(index, len(ranges), self.ports)
        self.engine = Engine(stage, self.codec, group, self.microbatch, config.pipeline.microbatches, config.train.dtype)
        self.runs = 0
        self.in_flight: list[int] = []
        self.sent_before: dict[int, int] = {}
        self._schedule(links.right, timing)

    def _open_links(self, stage: Stage, epoch: int) -> Links:
        """Open the links of an epoch, each with its contract of what may come over it, and the ports of the boundaries."""
        config, plan, form = self.config, stage.plan, (self.microbatch, self.config.model.context)
        codecs = {-1: self.codec.at(plan.layers.start), 1: self.codec.at(plan.layers.stop)}
        contracts = {
            worker_id: boundary_contract(codecs[side], *form, config.pipeline.microbatches, downstream=side > 0, epoch=epoch)
            for side, worker_id in self.neighbours.worker_id.sides(plan.count).items()
        }
        joined = self.neighbours.joined(config).values()
        links = self.neighbours.open(config, contracts | dict.fromkeys(joined, exchange_contract(epoch)))
        self.ports = {
            plan.index + side: boundary_port(link, codecs[side], *form, downstream=side > 0, version=lambda: stage.stream.version)
            for side, link in ((-1, links.left), (1, links.right))
            if link is not None
        }
        return links

    def bound_in_flight(self, limits: Sequence[int] | None) -> list[int]:
        """Agree with all stages on the microbatches in flight, at most so many here; return what each stage keeps."""
        everyone = self.gather_values(limits and limits[0], optional(whole(1, 2**31)))
        in_flight = within(self.in_flight, of_replica(everyone, self.replica, self.stages[0].plan.count))
        if in_flight != self.in_flight:
            self.in_flight = in_flight
            self.engine.rebuild("depth", in_flight)
        return in_flight

    def _share_basis(self, stage: Stage) -> None:
        """Use the basis that stage 0 made, to the last bit, and make sure that all stages know the same frozen features."""
        basis = stage.stream.basis()
        if basis is not None:
            spec = TensorSpec.raw(tuple(basis.shape), basis.dtype)
            data = self.control.basis_downstream(raw_bytes(basis) if stage.plan.first else None)
            stage.stream.adopt(from_raw_bytes(data, spec))
        mine = stage.stream.fingerprint()
        theirs = self.control.announce({"fingerprint": mine} if stage.plan.first else None, forms.FINGERPRINT)["fingerprint"]
        if theirs != mine:
            raise ValueError(
                f"stage {stage.plan.index} does not agree with stage 0 on basis and fixed features; use the same version of thinwire"
            )

    def _share_copies(self, stage: Stage) -> None:
        """Start from the owner's value of what both sides of a boundary use: QR differs in its last bits between CPUs."""
        for owner in stage.owned():
            first, *_ = self.peers.gather(raw_bytes(owner.weight))  # replica 0's
            owner.weight.data.copy_(from_raw_bytes(first, TensorSpec.raw(tuple(owner.weight.shape), owner.weight.dtype)))
            self.control.send_tensor(self.control.right, raw_bytes(owner.weight))
        for copy in stage.copies():
            copy.weight.data.copy_(self._receive_like(copy.weight.data, self.control.left))

    def _measure_link(self, right: Link | None) -> tuple[float, float]:
        """Return how long a payload travels to the next stage, and how long it occupies the line."""
        if right is None:
            return 0.0, 0.0
        rtt, rate = probe(right, burst_bytes=PROBE_BYTES)
        self.neighbours.report({"measured": str(right.peer), "rtt": rtt, "mbps": rate * 8e-6})
        size = sum(slot.spec.size(slot.direction) * slot.spec.usual for slot in self.ports[self.stages[0].plan.index + 1].outgoing)
        return rtt / 2, size / rate

    def _schedule(self, right: Link | None, timing: Outcome | None) -> None:
        """Make the schedule, as deep as the slowest link and stage ask for; all stages must agree on it."""
        slowest = self.control.settle(timing or self._measure(right), meeting=False)
        if slowest.turn_seconds == UNKNOWN.turn_seconds:  # nobody remembers: all were replaced
            slowest = self.control.settle(self._measure(right), meeting=False)
        self.timing = slowest
        wanted = self.config.pipeline.schedule
        name: ScheduleName = "depth" if wanted == "auto" else wanted
        stages, microbatches = self.stages[0].plan.count, self.config.pipeline.microbatches
        self.in_flight = depths(stages, microbatches, slowest.delay_seconds, slowest.turn_seconds)
        self.engine.rebuild(name, self.in_flight)

    def _measure(self, right: Link | None) -> Outcome:
        """Time the link to the next stage and a microbatch of this one."""
        latency, transmission = self._measure_link(right)
        # Where the line is slower than the stages it sets the pace: a depth by compute alone would hold the backwards back.
        turn = max(self.engine.measure(), transmission)
        return Outcome(START, None, 0.0, turn_seconds=turn, delay_seconds=latency + transmission)

    def _begin(self, counting: bool) -> None:
        for port in self.ports.values():
            port.begin(self.runs, counting)
        self.runs += 1

    def step(self, batch_BT1: Tensor | None, step: int, first_sample: int) -> float | None:
        """Accumulate this stage's gradients; the last stage returns the batch's mean loss."""
        for link in self.neighbours.opened.values():
            if link.error is not None:  # one that this step may not need: whoever was replaced there must not wait until one does
                raise link.error
        self._begin(counting=True)
        self.sent_before = {peer: port.link.meter.sent.socket for peer, port in self.ports.items()}
        return self.engine.step(batch_BT1, step, first_sample)

    def abandon(self) -> None:
        """Give up the step under way: the links fail, and with them whatever this worker and the others wait for."""
        self.neighbours.interrupt()

    def settle(self, own: Outcome, *, meeting: bool = True, alike: bool = False) -> Outcome:
        """Agree with all stages on the outcome of a step, and with the other replicas where they meet; gradients may be `alike` there."""
        return self.control.settle(own, meeting=meeting, alike=alike)

    @torch.no_grad()
    def evaluate(self, batch_BT1: Tensor | None, rows: int, step: int = 0) -> float:
        """Return the mean loss of a batch of `rows` sequences, a step's worth at a time; the last part is filled up and not counted."""
        total, size = 0.0, self.config.replica_batch
        for start in range(0, rows, size):
            part = None if batch_BT1 is None else _filled(batch_BT1[start : start + size], size)
            self._begin(counting=False)
            losses = self.engine.evaluate(part, step, start)
            used = min(size, rows - start) // self.microbatch
            total += sum(losses[:used])
        own = Outcome(EVALUATION, total * self.microbatch / rows if self.stages[0].plan.last else None, 0.0)
        loss = self.control.settle(own).loss
        assert loss is not None
        return loss

    def announce(self, facts: dict[str, Any] | None, form: Form = ANY) -> dict[str, Any]:
        return self.control.announce(facts, form)

    def gather(self, own: Sequence[dict[str, Any]], form: Form = ANY) -> list[dict[str, Any]]:
        found = self.control.gather(own[0], form)
        expected = self.config.replicas.count * self.stages[0].plan.count
        if len(found) != expected:
            raise ProtocolError("workers", len(found), expected)
        return found

    def gather_values(self, own: Any, form: Form = ANY) -> list[Any]:
        return [part["value"] for part in self.gather([{"value": own}], forms.values(form))]

    @property
    def keeps_copies(self) -> bool:
        return self.copies is not None

    def copy_last(self, name: str) -> None:
        assert self.copies is not None
        sent = self.gather_values(self.copies.send(name), FLAG)
        of_stages = of_replica(sent, self.replica, self.stages[0].plan.count)
        self.copies.wait_for_copies(name, [stage for stage, done in enumerate(of_stages) if done])

    def held_copies(self) -> dict[str, list[str]]:
        return self.copies.held() if self.copies else {}

    def fetch_copies(self, name: str, votes: Sequence[dict[str, Any]]) -> None:
        plan = self.stages[0].plan
        index, votes = plan.index, of_replica(votes, self.replica, plan.count)
        if self.copies:
            self.copies.expect(None if name in votes[index]["steps"] else name)
        for stage, vote in enumerate(votes):
            if name in vote["steps"]:
                continue
            keepers = [other for other in (stage + 1, stage - 1) if 0 <= other < len(votes)]
            keeper = next((other for other in keepers if name in votes[other]["copies"].get(str(stage), [])), None)
            if keeper is None or (self.copies is None and index in (stage, keeper)):
                raise ProtocolError("vote", f"{name} of stage {stage}", "a checkpoint that it has, or of which a neighbour keeps a copy")
            if self.copies and index == keeper:
                self.copies.give_back(stage, name)
            if self.copies and index == stage:
                self.copies.wait_for(name)

    def offer(self, name: str) -> None:
        if self.copies:
            self.copies.offer(name)

    def copied(self, steps: tuple[int, ...]) -> tuple[int, ...]:
        return self.copies.copied(steps) if self.copies else steps

    def uncopied(self) -> tuple[int, ...]:
        return self.copies.unwritten() if self.copies else ()

    def confirm(self, step: int) -> None:
        if self.copies:
            self.copies.confirm(step)

    def link_meters(self) -> list[dict[str, Any]]:
        return [link.meter.snapshot() for link in self.neighbours.opened.values()]

    def link_figures(self, seconds: float) -> dict[str, float]:
        """Return the Mbit/s sent to each neighbour during a step, socket bytes counted."""
        index = self.stages[0].plan.index
        return {
            f"{'left' if peer < index else 'right'}_mbps": (port.link.meter.sent.socket - self.sent_before[peer]) * 8e-6 / seconds
            for peer, port in self.ports.items()
        }

    def next_basis(self) -> Tensor:
        """Receive the basis that the last stage proposes, or propose it."""
        stream = self.stages[0].stream
        basis = stream.basis()
        assert basis is not None
        data = raw_bytes(self.codec.propose_basis(stream)) if self.stages[0].plan.last else None
        spec = TensorSpec.raw(tuple(basis.shape), basis.dtype)
        return from_raw_bytes(self.control.basis_upstream(data), spec).to(basis.device)

    def update_shared(self, rate_factor: float) -> None:
        """Send the copies' gradients upstream, update what is owned here, and take the copies' new values.

        Whatever the exchange, replicas average these gradients: parameters on a manifold cannot be averaged afterwards.
        """
        (stage,) = self.stages
        copies, owned = stage.copies(), stage.owned()
        for copy in copies:
            self.control.send_tensor(self.control.left, raw_bytes(gradient_of(copy)))
        for owner in owned:
            gradient = gradient_of(owner)
            gradient += self._receive_like(gradient, self.control.right)
            (gradient,) = mean(self.peers, [gradient])
            owner.update(gradient, rate_factor)
            self.control.send_tensor(self.control.right, raw_bytes(owner.weight))
            meter = self.ports[stage.plan.index + 1].meter
            meter.forward += gradient.nbytes
            meter.backward += gradient.nbytes
        for copy in copies:
            copy.weight.data.copy_(self._receive_like(copy.weight.data, self.control.left))

    def _receive_like(self, tensor: Tensor, link: Link | None) -> Tensor:
        data = self.control.receive_tensor(link)
        return from_raw_bytes(data, TensorSpec.raw(tuple(tensor.shape), tensor.dtype)).to(tensor.device)

    def release(self) -> None:
        """Let go of everything when the links have ended: torch keeps the group for longer, and the group must not keep the stage."""
        self.stages[0].runner.close()
        if self.copies:
            self.copies.close()
        self.engine.group.ports.clear()  # type: ignore[attr-defined]


def largest_part(model: ModelConfig, stage: Stage) -> int:
    """Return more bytes than any stage's part of a checkpoint has: all layers, and ends like this one's, with their state."""
    numbers = stage.architecture.count(model, model.layers) + sum(parameter.numel() for parameter in stage.parameters())
    return 64 * numbers + PROBE_BYTES


def _filled(batch_BT1: Tensor, size: int) -> Tensor:
    """Repeat the last row until the batch has `size` rows."""
    missing = size - len(batch_BT1)
    return torch.cat((batch_BT1, batch_BT1[-1:].expand(missing, -1))) if missing else batch_BT1
