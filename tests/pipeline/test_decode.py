"""Reading in chunks and token by token, with keys and values kept, computes what reading the whole sequence computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import TINY, make_pipeline, random_ids
from thinwire.config.registry import CODECS
from thinwire.model.ends import Context
from thinwire.pipeline.decode import CHUNK, Writer, chosen_slot, chunks, forward_slots

LONG = replace(TINY, context=160)
BY_TOKEN = {
    "dense": {},
    "subspace": {"rank": 5},
    "quantize": {"bits": 4},
    "hadamard": {},
    "bottleneck": {"channels": 7},
    "autoencoder": {"channels": 7},
    "topk": {"density": 0.2},
    "anchored": {"rank": 6, "ngrams": 3, "buckets": 50, "anchor_rank": 4},
    "lossless": {},
}
"""Codecs that treat every token by itself: it does not matter to them how a text is cut."""


def ids_of(length: int) -> list[int]:
    return torch.randint(0, LONG.vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def pipeline_of(codec: str):
    pipeline = make_pipeline(codec, LONG, stages=4, **BY_TOKEN[codec])
    with torch.no_grad():  # tables that start at zero would hide a wrong index
        for stage in pipeline.stages:
            for parameter in stage.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=parameter.dtype)
    return pipeline


def whole(pipeline, ids: list[int]) -> Tensor:
    """Return the logits behind every token of a sequence that is read at once."""
    ids_BT, payload = torch.tensor([ids]), ()
    tables = tuple(table[: len(ids)] for table in pipeline.stages[0].tables)
    for stage in pipeline.stages:
        with torch.no_grad():
            payload = stage._through(ids_BT, payload, Context(0, torch.zeros(1, dtype=torch.int64), training=False), tables)
    return payload[0][0]


def entropy_coded():
    """Return a pipeline whose boundaries have learnt from a few steps."""
    pipeline = make_pipeline("anchored", LONG, stages=4, rank=6, entropy=True, rate=2.0)
    for step in range(3):
        pipeline.step(random_ids(LONG, seed=step), step, 4 * step)
        pipeline.update_shared(step, 1.0)
    return pipeline


@pytest.mark.parametrize("codec", [*BY_TOKEN, "entropy"])
@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 7])
def test_step_by_step_equals_the_whole(codec, length):
    pipeline = entropy_coded() if codec == "entropy" else pipeline_of(codec)
    ids = ids_of(length + 20)
    expected = whole(pipeline, ids)
    following, seen = iter(ids[length:]), []

    def choose(logits_V: Tensor) -> int:
        seen.append(logits_V)
        return next(following)

    written = list(Writer(pipeline.stages, pipeline.codec, 0, "fp64").write(ids[:length], 20, None, choose))
    assert written == ids[length:]
    error = (torch.stack(seen) - expected[length - 1 : -1]).abs().max() / expected.abs().max()
    assert error < 1e-12


def test_the_end_token_ends_the_text_and_is_not_part_of_it():
    pipeline = make_pipeline("dense")
    choices = iter([5, 6, 7])
    assert list(Writer(pipeline.stages, pipeline.codec, 0, "fp64").write([1], 9, 7, lambda logits: next(choices))) == [5, 6]


def test_meters_count_the_payload_of_new_tokens_and_the_id_that_returns():
    pipeline = make_pipeline("subspace", stages=4, rank=5, dtype="fp32")
    writer = Writer(pipeline.stages, pipeline.codec, 0, "fp32")
    list(writer.write(ids_of(3), 11, None, lambda logits: 0))
    for meter in writer.meters:
        assert (meter.tokens, meter.forward, meter.backward) == (10, 10 * 5 * 4, 10 * 2)


def test_the_last_chunk_is_filled_up():
    assert [(len(ids), count) for ids, count in chunks(range(130))] == [(CHUNK, CHUNK), (CHUNK, CHUNK), (CHUNK, 2)]
    assert list(chunks([])) == []


@pytest.mark.parametrize("codec", CODECS.built_in)
def test_every_codec_has_forms_for_prompt_and_token_and_writes(codec):
    options = {"rank": 4} if codec in ("subspace", "anchored", "lowrank") else {}
    pipeline = make_pipeline(codec, dtype="fp32", **options)
    for time in (CHUNK, 1):
        assert len(forward_slots(pipeline.codec, time)) == len(pipeline.codec.spec(1, time).tensors) + (time > 1)
    assert chosen_slot(pipeline.codec).spec.backward_bytes == 2
    writer = Writer(pipeline.stages, pipeline.codec, 0, "fp32")
    assert len(list(writer.write(ids_of(5), 4, None, lambda logits: int(logits.argmax())))) == 4


def test_an_id_outside_the_vocabulary_is_refused():
    pipeline = make_pipeline("dense")
    with pytest.raises(ValueError, match="token 97 is not one of the 97"):
        list(Writer(pipeline.stages, pipeline.codec, 0, "fp64").write([97], 1, None, lambda logits: 0))
