"""What `fuzz.py` feeds to the readers of entropy-coded payloads and ids: the first byte says which, the others are what a peer sent."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from thinwire.bits.entropy import LIMIT
from thinwire.bits.ladder import HIGHEST, LOWEST
from thinwire.bits.raw import Direction
from thinwire.codecs.base import Codec
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context, Learning
from thinwire.pipeline.boundary import checked_ids, ids_spec

MODEL = ModelConfig(vocabulary=50, width=16, layers=2, heads=2, kv_heads=2, ffn=16, context=6)
BATCH = 2
WAYS: tuple[Direction, Direction] = ("forward", "backward")
IDS = ids_spec(BATCH, MODEL.context, MODEL.vocabulary, exact=False)


@cache
def learnt() -> tuple[Codec, list[bytes]]:
    """Let a boundary learn for three steps; return the codec of its receiving end, and what crossed in the next."""
    codec = make_codec(codec_defaults("anchored", rank=5, entropy=True, rate=2.0), MODEL)
    torch.manual_seed(0)
    exit, entry = codec.ends(StagePlan(0, 2, range(1)))[1], codec.ends(StagePlan(1, 2, range(1, 2)))[0]
    assert exit is not None and entry is not None
    sender, receiver, found = codec.with_end(exit), codec.with_end(entry), []
    for step in range(4):
        ids, context = torch.randint(0, 50, (BATCH, MODEL.context + 1)), Context(step, torch.arange(BATCH))
        (sent,) = exit(torch.randn(BATCH, MODEL.context, MODEL.width).requires_grad_(), ids[:, :-1], context)
        row = sent.detach().requires_grad_()
        entry((row,), ids[:, :-1], context).square().sum().backward()
        assert row.grad is not None
        found = [b"\0" + sender.pack(0, sent, "forward"), b"\1" + receiver.pack(0, row.grad, "backward")]
        found.append(b"\2" + sender.pack_ids(ids.to(IDS.dtype)))
        if step < 3:
            for end in (exit, entry):
                for part in end.modules():
                    if isinstance(part, Learning):
                        part.commit()
    return receiver, found


def payloads(folder: Path) -> list[bytes]:
    return learnt()[1]


def read_payload(data: bytes, folder: Path) -> None:
    """Take a payload apart: what is not refused has the declared form, with numbers that can be."""
    codec, _ = learnt()
    kind = data[0] % 3 if data else 0
    if kind == 2:
        ids = checked_ids(codec.unpack_ids(data[1:], IDS), MODEL.vocabulary)
        assert ids.shape == IDS.shape and ids.dtype == IDS.dtype
        return
    (spec,) = codec.spec(BATCH, MODEL.context).tensors
    row = codec.unpack(0, data[1:], spec, WAYS[kind])
    assert row.shape == spec.shape and row.dtype == spec.dtype
    assert LOWEST <= float(row[0]) <= HIGHEST and float(row[1:].abs().max()) <= LIMIT + 1
