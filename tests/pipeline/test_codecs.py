"""Every codec: crossing boundaries as bytes gives the loss and the gradients of one graph in which nothing is packed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from helpers import MICROBATCH, gradients, make_pipeline, random_ids, relative
from thinwire.config.registry import CODECS
from thinwire.model.ends import Context
from thinwire.pipeline.engine_module import EngineModule

VARIANTS = [(name, {}) for name in CODECS.names()]
VARIANTS += [
    ("dense", {"bits": 4}),
    ("subspace", {"rank": 5, "bits": 3}),
    ("anchored", {"rank": 6, "bits": 4, "projector": "learned", "ngrams": 2, "anchors": "factorised"}),
    ("subspace", {"rank": 5, "entropy": True, "rate": 2.0}),
    ("anchored", {"rank": 6, "entropy": True, "bits": 4, "backward_rate": 2.5}),
    ("topk", {"bits": 4}),
    ("topk", {"warmup": 1}),
    ("topk", {"warmup": 0, "from_layer": 3}),
    ("quantize", {"warmup": 2, "from_layer": 1}),
]


def one_graph(pipeline, batch_BT1: torch.Tensor, step: int) -> float:
    """Run the stages of a pipeline as one differentiable function."""
    total = 0.0
    for start in range(0, len(batch_BT1), MICROBATCH):
        ids, payload = batch_BT1[start : start + MICROBATCH], ()
        context = Context(step, torch.arange(start, start + MICROBATCH))
        for stage in pipeline.stages:
            payload = stage(ids, payload, context)
        share = payload[0] * (MICROBATCH / len(batch_BT1))
        share.backward()
        total += share.item()
    return total


@pytest.mark.parametrize("name, options", VARIANTS, ids=str)
def test_bytes_change_nothing(name, options):
    ids = random_ids()
    for step in (0, 1, 2):
        # Codecs whose state learns from the stream start alike, so step 2 compares what they learned as well.
        packed, plain = (make_pipeline(name, stages=3, split="1,2,1", **options) for _ in range(2))
        for number in range(step + 1):
            loss, expected = packed.step(ids, number, 0), one_graph(plain, ids, number)
        assert loss == pytest.approx(expected, rel=1e-10)
        found, wanted = gradients(packed), gradients(plain)
        assert found.keys() == wanted.keys()
        for key, gradient in wanted.items():
            assert relative(found[key], gradient) < 1e-10 if gradient.any() else not found[key].any(), key


def test_left_off_before_a_layer():
    pipeline = make_pipeline("quantize", stages=4, from_layer=2, dtype="fp32")
    pipeline.step(random_ids(), 0, 0)
    width = pipeline.codec.model.width
    assert [boundary.meter.backward / boundary.meter.tokens for boundary in pipeline.boundaries] == [4 * width, width + 2, width + 2]


def test_warm_up_sends_the_whole_stream_then_the_codec():
    pipeline = make_pipeline("quantize", stages=2, warmup=2, dtype="fp32")
    sent = [0.0]
    for step in range(3):
        pipeline.step(random_ids(), step, 0)
        sent.append(pipeline.boundaries[0].meter.backward)
    tokens, width = pipeline.boundaries[0].meter.tokens / 3, pipeline.codec.model.width
    assert [(after - before) / tokens for before, after in pairwise(sent)] == [4 * width, 4 * width, width + 2]


def test_a_negative_warm_up_is_refused():
    with pytest.raises(ValueError, match=r"codec.warmup is -1"):
        make_pipeline("quantize", warmup=-1)


@pytest.mark.parametrize("options", [{"backward_bits": 4}, {"rounding": "stochastic"}])
def test_options_of_a_quantiser_that_is_not_there_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"codec.{name} is .*, but nothing is quantised"):
        make_pipeline("dense", **options)


def test_what_an_engine_is_given_to_send_is_contiguous():
    """As gloo and older engines demand."""
    for name in CODECS.names():
        pipeline = make_pipeline(name, stages=2)
        sent = EngineModule(pipeline.stages[0], "fp32")(random_ids(batch=MICROBATCH), samples_B=torch.arange(MICROBATCH))
        assert all(tensor.is_contiguous() for tensor in sent), name
