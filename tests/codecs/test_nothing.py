"""The control: no byte crosses, the last stage learns alone, and the others do not break a step."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY, gradients, make_pipeline, random_ids
from thinwire.codecs.base import Codec
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.sections import RunConfig, TrainConfig
from thinwire.metrics.summary import summarise
from thinwire.optim.optimizers import StageOptimizer, clip_scale
from thinwire.pipeline.inprocess import Pipeline


def test_only_ids_cross_and_none_where_all_know_them():
    plain = make_pipeline("nothing", stages=3, split="1,2,1", ngrams=2)
    known = Pipeline(plain.stages, plain.codec, 2, TINY.context, known_ids=True)
    for pipeline in (plain, known):
        pipeline.step(random_ids(), 0, 0)
    assert [(meter.forward, meter.backward) for meter in plain.traffic.boundaries] == [(4 * 13 * 2, 0)] * 2
    assert [(meter.forward, meter.backward, meter.tokens) for meter in known.traffic.boundaries] == [(0, 0, 4 * 12)] * 2


@pytest.mark.parametrize("optimizer", ["shared", "adamw", "muon"])
def test_the_last_stage_learns_alone(optimizer):
    pipeline = make_pipeline("nothing", stages=3, split="1,2,1", anchors="factorised", anchor_rank=4)
    train = TrainConfig(optimizer=optimizer, weight_decay=0.0)
    optimizers = [StageOptimizer(stage, train) for stage in pipeline.stages]
    before = [{name: each.detach().clone() for name, each in stage.named_parameters()} for stage in pipeline.stages]
    losses = []
    for step in range(20):
        losses.append(pipeline.step(random_ids(), step, 0))
        norm = sum(each.squared_norm() for each in optimizers) ** 0.5
        assert norm > 0
        for each in optimizers:
            each.step(1.0, clip_scale(norm, 1.0))
    assert losses[-1] < losses[0] - 0.3
    for stage, found in zip(pipeline.stages, before, strict=True):
        moved = [name for name, each in stage.named_parameters() if not torch.equal(each, found[name])]
        assert bool(moved) == stage.plan.last, moved


def test_the_first_stages_get_gradients_of_zero():
    """An engine wants some, and clipping counts them."""
    pipeline = make_pipeline("nothing", stages=2)
    pipeline.step(random_ids(), 0, 0)
    found = gradients(pipeline)
    assert not found["embedding.weight"].any() and found["head.weight"].any()


def test_a_summary_of_no_bytes_has_no_ratio():
    part = {"boundary": {"tokens": 9, "forward": 0, "backward": 0, "ids": 0}, "links": [], "hashes": {}, "parameters": 1, "exchange": 0}
    config = RunConfig(codec=codec_defaults("nothing"))
    found = summarise(config, {"timed_steps": 1}, [part | {"memory": None}], [None])
    assert found["compression"] is None and found["bytes_per_token_forward"] == 0


@pytest.mark.parametrize("options, message", [({"bits": 4}, "codec.bits is 4"), ({"ngrams": 0}, "codec.ngrams is 0")])
def test_what_says_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_codec(codec_defaults("nothing", **options), TINY)


def test_entropy_coding_of_nothing_is_refused():
    with pytest.raises(ValueError, match="does not send a row of plain values"):
        make_codec(codec_defaults("nothing", entropy=True, rate=1.0), TINY)


def test_it_declares_no_byte():
    codec: Codec = make_codec(codec_defaults("nothing"), TINY)
    assert [codec.spec(2, 5).bytes_per_token(way) for way in ("forward", "backward")] == [0, 0]
