"""Read a prompt and write text token by token through the stages, with keys and values kept in each: in one process, or over links.

What crosses a boundary is the codec's payload of 64 prompt tokens at a time with their ids, then of one new token; its id needs no wire
forward, because the sampled id comes back along the chain. The forms of both are fixed beforehand, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.bits.raw import TensorSpec
from thinwire.codecs.base import Codec
from thinwire.config.sections import Dtype
from thinwire.link.contract import Contract, Flow, Phase
from thinwire.link.frame import Kind
from thinwire.link.link import Link
from thinwire.model.block import KVCache
from thinwire.model.ends import Context
from thinwire.model.stage import Stage
from thinwire.pipeline.backend import MESSAGE_BYTES, Port, form
from thinwire.pipeline.boundary import Slot, ids_slot, ids_spec
from thinwire.pipeline.inprocess import ends_between
from thinwire.pipeline.meter import Meter

CHUNK = 64
"""Prompt tokens that are read at once; the last chunk is filled up."""
WRITING = 2**20
"""Frames of the prompt are numbered from 0, those of written tokens from here."""

Choose = Callable[[Tensor], int]
"""Choose the next token from the logits behind the last one."""


def forward_slots(codec: Codec, time: int) -> tuple[Slot, ...]:
    """List what crosses a boundary for so many tokens: prompt tokens bring their ids."""
    ids = (ids_slot(codec, 1, time - 1),) if time > 1 else ()
    return (*ids, *(Slot(spec, index, "forward") for index, spec in enumerate(codec.spec(1, time).tensors)))


def chosen_slot(codec: Codec) -> Slot:
    """Describe the chosen id on its way back."""
    spec = ids_spec(1, 0, codec.model.vocabulary)
    return Slot(TensorSpec(spec.shape, spec.dtype, 0, spec.forward_bytes), None, "backward")


def writing_contract(codec: Codec, *, downstream: bool) -> Contract:
    """Derive a link's contract towards the next stage (`downstream`) or the previous one."""
    prompt, token = (tuple(form(slot) for slot in forward_slots(codec, time)) for time in (CHUNK, 1))
    forward = Flow((Phase(0, prompt, 1), Phase(WRITING, token, 1)), consecutive=False)
    backward = Flow.constant((form(chosen_slot(codec)),), 1, first_step=WRITING)
    contract = Contract(forward, backward, limits={Kind.STEP: MESSAGE_BYTES})
    return contract if downstream else contract.mirrored()


class Reader:
    """One stage with what it has read so far."""

    def __init__(self, stage: Stage, step: int, dtype: Dtype) -> None:
        self.stage, self.step = stage, step
        self.device = stage.device
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == "bf16")
        self.cache = KVCache(self.device)

    def read(self, ids: Sequence[int], payload: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
        """Read tokens, `count` of them real; return the payload to send, or (the logits behind the last real one,)."""
        vocabulary = self.stage.model.vocabulary
        if not all(0 <= token < vocabulary for token in ids):
            raise ValueError(
                f"token {next(token for token in ids if not 0 <= token < vocabulary)} is not one of the {vocabulary} there are"
            )
        ids_BT = torch.tensor([ids], dtype=torch.int64, device=self.device)
        context = Context(self.step, torch.zeros(1, dtype=torch.int64, device=self.device), training=False)
        with self.autocast:
            output = self.stage.read(ids_BT, tuple(tensor.to(self.device) for tensor in payload), context, self.cache, count)
        return (output[0][0, count - 1],) if self.stage.plan.last else output


def chunks(prompt: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Cut a prompt into chunks of equal length, the last one filled up with its last token; with the number of real tokens."""
    for start in range(0, len(prompt), CHUNK):
        part = list(prompt[start : start + CHUNK])
        yield part + part[-1:] * (CHUNK - len(part)), len(part)


class Writer:
    """All stages in one process, with real bytes at every boundary."""

    def __init__(self, stages: list[Stage], codec: Codec, step: int, dtype: Dtype) -> None:
        self.readers = [Reader(stage, step, dtype) for stage in stages]
        self.boundaries = [
            tuple(map(codec.at(before.plan.layers.stop).with_end, ends_between(before, behind))) for before, behind in pairwise(stages)
        ]
        """The codec of each boundary as its sender and as its receiver use it."""
        self.meters = [Meter() for _ in self.boundaries]
        """Payload bytes of new tokens at each boundary."""

    def write(self, prompt: Sequence[int], limit: int, end: int | None, choose: Choose) -> Iterator[int]:
        """Yield the tokens that follow a prompt, up to `limit` or the end token, which is not yielded."""
        for ids, count in chunks(prompt):
            logits_V = self._through(ids, count)
        for number in range(limit):
            token = choose(logits_V)
            if token == end:
                return
            yield token
            if number + 1 < limit:
                logits_V = self._through([token], 1)

    def _through(self, ids: list[int], count: int) -> Tensor:
        """Read tokens with all stages; return the logits behind the last real one."""
        payload: Sequence[Tensor] = ()
        for reader, (sender, receiver), meter in zip(self.readers[:-1], self.boundaries, self.meters, strict=True):
            slots = [slot for slot in forward_slots(sender, len(ids)) if slot.index is not None]
            packed = [slot.pack(sender, tensor) for slot, tensor in zip(slots, reader.read(ids, payload, count), strict=True)]
            payload = [slot.unpack(receiver, data) for slot, data in zip(slots, packed, strict=True)]
            if len(ids) == 1:
                meter.tokens += 1
                meter.forward += sum(map(len, packed))
                meter.backward += chosen_slot(sender).spec.backward_bytes
        return self.readers[-1].read(ids, payload, count)[0]


class WorkerWriter:
    """One stage in this process, its neighbours behind links."""

    def __init__(self, reader: Reader, codec: Codec, left: Link | None, right: Link | None) -> None:
        self.reader = reader
        layers, self.version = reader.stage.plan.layers, reader.stage.stream.version
        entry, exit = reader.stage.entry, reader.stage.exit
        before = codec.at(layers.start) if entry is None else codec.at(layers.start).with_end(entry)
        behind = codec.at(layers.stop) if exit is None else codec.at(layers.stop).with_end(exit)
        self.left = {time: _port(left, before, time, downstream=False) for time in (CHUNK, 1)} if left else None
        self.right = {time: _port(right, behind, time, downstream=True) for time in (CHUNK, 1)} if right else None
        self.meters = [self.right[1].meter] if self.right else []
        """Payload bytes of new tokens at the boundary behind this stage."""

    def write(self, prompt: Sequence[int] | None, length: int, limit: int, end: int | None, choose: Choose) -> Iterator[int]:
        """Do this stage's part and yield the tokens, as every stage does. Stage 0 knows the prompt, the others its length."""
        parts = list(chunks(prompt)) if prompt else [(None, min(CHUNK, length - start)) for start in range(0, length, CHUNK)]
        for step, (ids, count) in enumerate(parts):
            self._begin(step, CHUNK)
            output = self._step(ids, count, CHUNK)
        for number in range(limit):
            self._begin(WRITING + number, 1)
            token = int(self.right[1].take()) if self.right else choose(output[0])
            if self.left:
                self.left[1].send(torch.tensor([[token]]))
            if token == end:
                return
            yield token
            if number + 1 < limit:
                output = self._step([token], 1, 1)

    def _begin(self, step: int, time: int) -> None:
        for side in (self.left, self.right):
            if side:
                side[time].begin(step, version=self.version)

    def _step(self, ids: list[int] | None, count: int, time: int) -> tuple[Tensor, ...]:
        """Read the next tokens with this stage: its ids, where they are not known, and its payload come from the left."""
        received = [self.left[time].take() for _ in self.left[time].incoming] if self.left else []
        if ids is None:
            ids, received = received[0].flatten().tolist(), received[1:]
        output = self.reader.read(ids, received, count)
        if self.right:
            port = self.right[time]
            for tensor in output if time == 1 else (torch.tensor([ids]), *output):
                port.send(tensor)
            port.meter.tokens += 1 if time == 1 else 0
        return output


def _port(link: Link, codec: Codec, time: int, *, downstream: bool) -> Port:
    """Make the port for so many tokens at a time towards the next stage (`downstream`) or the previous one."""
    forward, backward = forward_slots(codec, time), (chosen_slot(codec),)
    outgoing, incoming = (forward, backward) if downstream else (backward, forward)
    return Port(link, codec, outgoing, incoming, time)
