"""The torch.distributed backend `thinwire`: sends and receives the payloads of one worker's boundaries over its Links.

A send is eager: the tensor is packed, queued and forgotten. A receive is done when somebody waits for it, in the order in which receives
were posted. There is no store, no rendezvous and no collective.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.bits.raw import TensorSpec
from thinwire.codecs.base import Codec
from thinwire.link.contract import Contract, Flow, TensorForm
from thinwire.link.frame import Channel, Dtype, Frame, Header, Kind
from thinwire.link.link import Link
from thinwire.pipeline.boundary import DIRECTIONS, Slot, slots
from thinwire.pipeline.meter import Meter
from thinwire.util.device import to_device

NAME = "thinwire"
HOST = torch.device("cpu")
CODES = {
    torch.float64: Dtype.FP64,
    torch.float32: Dtype.FP32,
    torch.float16: Dtype.FP16,
    torch.bfloat16: Dtype.BF16,
    torch.uint16: Dtype.UINT16,
    torch.int32: Dtype.INT32,
}


def form(slot: Slot) -> TensorForm:
    """Describe a slot as the link has it."""
    size = slot.spec.size(slot.direction)
    plain = size == TensorSpec.raw(slot.spec.shape, slot.spec.dtype).forward_bytes
    code = CODES.get(slot.spec.dtype, Dtype.RAW) if plain else Dtype.RAW
    return TensorForm(code, slot.spec.shape, size, slot.spec.exact)


MESSAGE_BYTES = 2**24
"""Most bytes of a control message; the summary of a run lists a hash per tensor."""


@dataclass(frozen=True)
class BoundaryForm:
    """What crosses the boundary to one neighbour, each way, for one microbatch; it is the same in every epoch."""

    outgoing: tuple[Slot, ...]
    incoming: tuple[Slot, ...]
    sent: tuple[TensorForm, ...]
    """What goes out, as the link has it."""
    payload: tuple[TensorSpec, ...]
    """What crosses besides the ids."""
    tokens: int
    contract: Contract
    """What the link may carry, in epoch 0."""


def boundary_form(
    codec: Codec, batch: int, context: int, microbatches: int, *, downstream: bool, known_ids: bool = False, marked: bool = False
) -> BoundaryForm:
    """Derive the form of the boundary to the next stage (`downstream`) or the previous one from the codec there."""
    each = slots(codec, batch, context, known_ids=known_ids, marked=marked)
    forward, backward = (tuple(map(form, each[direction])) for direction in DIRECTIONS)
    travelling = tuple(one for one, slot in zip(forward, each["forward"], strict=True) if not slot.known)
    flows = Flow.constant(travelling, microbatches), Flow.constant(backward, microbatches, consecutive=False)
    contract = Contract(*flows, limits={Kind.STEP: MESSAGE_BYTES})
    payload = tuple(slot.spec for slot in each["backward"])
    if downstream:
        return BoundaryForm(each["forward"], each["backward"], forward, payload, batch * context, contract)
    return BoundaryForm(each["backward"], each["forward"], backward, payload, batch * context, contract.mirrored())


class Port:
    """One neighbour: number, pack and send what leaves; receive, check and unpack what comes."""

    def __init__(
        self,
        link: Link,
        codec: Codec,
        outgoing: Sequence[Slot],
        incoming: Sequence[Slot],
        tokens: int,
        forms: Sequence[TensorForm] | None = None,
    ) -> None:
        """Carry these tensors each way, so many tokens at a time; `forms` are those of the outgoing ones, where they are known."""
        self.link, self.codec, self.outgoing, self.incoming, self.tokens = link, codec, outgoing, incoming, tokens
        self.forms = forms or [form(slot) for slot in outgoing]
        self.meter = Meter()
        self.posted: deque[Receipt] = deque()
        self.known = sum(slot.known for slot in outgoing)
        """How many of the outgoing tensors, all of them first, do not travel."""
        self.begin(0)

    def begin(self, number: int, *, version: int = 0, counting: bool = True, ids: Tensor | None = None) -> None:
        """Start run `number` of the engine (a step or an evaluation) in a version of the basis: both ends count its frames alike.

        `ids` are those of all its microbatches where every stage knows them.
        """
        assert not self.posted, "receives of the run before are still posted"
        self.number, self.version, self.counting, self.ids, self.sent, self.taken = number, version, counting, ids, 0, 0

    def send(self, tensor: Tensor) -> None:
        started = time.perf_counter()
        microbatch, index = divmod(self.sent, len(self.outgoing))
        slot = self.outgoing[index]
        if slot.known:
            self.sent += 1
            self._count(slot, 0)
            return
        data = slot.pack(self.codec, tensor.detach())
        self.sent += 1
        self.meter.encode_seconds += time.perf_counter() - started
        wanted = self.forms[index]
        header = Header(
            Kind.DATA,
            Channel.BOUNDARY,
            epoch=self.link.epoch,
            step=self.number,
            microbatch=microbatch,
            tensor=index - self.known,
            basis_version=self.version,
            dtype=wanted.dtype,
            dims=wanted.dims,
            length=len(data),
            total=len(data),
        )
        self.link.send(Frame(header, data))
        self._count(slot, len(data))

    def _count(self, slot: Slot, size: int) -> None:
        if not self.counting:
            return
        if slot.direction == "backward":
            self.meter.backward += size
            return
        self.meter.forward += size
        if slot.index is None:
            self.meter.ids += size
            self.meter.tokens += self.tokens

    def post(self, tensor: Tensor) -> Receipt:
        receipt = Receipt(self, tensor)
        self.posted.append(receipt)
        return receipt

    def take(self) -> Tensor:
        """Receive the next tensor of the run; one that is known is already here."""
        microbatch, index = divmod(self.taken, len(self.incoming))
        if self.incoming[index].known:
            assert self.ids is not None
            self.taken += 1
            self._count(self.incoming[index], 0)
            return self.ids.split(self.incoming[index].spec.shape[0])[microbatch]
        started = time.perf_counter()
        frame = self.link.receive(Channel.BOUNDARY, basis_version=self.version)
        arrived = time.perf_counter()
        slot = self.incoming[index]
        self.taken += 1
        self._count(slot, len(frame.payload))
        tensor = slot.unpack(self.codec, frame.payload)
        self.meter.wait_seconds += arrived - started
        self.meter.decode_seconds += time.perf_counter() - arrived
        return tensor


def boundary_port(link: Link, codec: Codec, form: BoundaryForm) -> Port:
    """Make the port to a neighbour."""
    return Port(link, codec, form.outgoing, form.incoming, form.tokens, form.sent)


class Receipt(dist.Work):
    """A posted receive."""

    def __init__(self, port: Port, tensor: Tensor) -> None:
        super().__init__()
        self.port, self.tensor, self.done = port, tensor, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self.done:
            first = self.port.posted.popleft()
            with torch.no_grad():
                first.tensor.copy_(to_device(self.port.take(), first.tensor.device))
            first.done = True
        return True

    def is_completed(self) -> bool:
        return self.done


class Sent(dist.Work):
    """A send: done as soon as it is queued."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class LinkGroup(dist.ProcessGroup):
    """The process group of one worker: point-to-point with its neighbours, nothing else."""

    def __init__(self, world_rank: int, size: int, ports: Mapping[int, Port]) -> None:
        super().__init__(world_rank, size)  # type: ignore[call-arg]
        self.ports = dict(ports)

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> dist.Work:
        self.ports[destination].send(tensors[0])
        return Sent()

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        return self.ports[source].post(tensors[0])

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name the group, which torch 2.14 asks for; a group without a backend of torch's has no other."""
        return NAME


def open_group(world_rank: int, size: int, ports: Mapping[int, Port], device: torch.device = HOST) -> dist.ProcessGroup:
    """Make the group torch's engine works with. The store lives in this process: nothing listens, nothing is shared."""
    group = LinkGroup(world_rank, size, ports)
    devices = dict.fromkeys(["cpu", "cuda", "xpu", "mps", device.type])
    dist.Backend.register_backend(NAME, lambda store, rank, size, timeout: group, devices=list(devices))
    dist.init_process_group(NAME, store=dist.HashStore(), rank=world_rank, world_size=size)
    return group


def close_group() -> None:
    """Forget the group, so that another can be made."""
    if dist.is_initialized():
        group = dist.group.WORLD
        dist.destroy_process_group()
        if isinstance(group, LinkGroup):  # torch keeps it for longer, and it must not keep the stage
            group.ports.clear()
