"""The in-process pipeline: bytes counted, microbatches that change nothing, evaluation that leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import TINY, gradients, make_pipeline, random_ids, relative
from thinwire.pipeline.inprocess import Pipeline


def test_counted_bytes_are_those_declared():
    pipeline = make_pipeline("subspace", stages=4, rank=6, dtype="fp32")
    pipeline.step(random_ids(batch=8), 0, 0)
    spec, ids = pipeline.boundaries[0].spec, pipeline.boundaries[0].ids_slot.spec
    assert pipeline.traffic.per_token("ids") == ids.forward_bytes / spec.tokens == 2 * 13 / 12
    assert pipeline.traffic.per_token("forward") == spec.bytes_per_token("forward") + pipeline.traffic.per_token("ids") == 24 + 2 * 13 / 12
    assert pipeline.traffic.per_token("backward") == 24
    assert [meter.tokens for meter in pipeline.traffic.boundaries] == [8 * 12] * 3


def test_evaluation_counts_no_bytes_and_leaves_no_gradient():
    pipeline = make_pipeline("subspace", rank=6)
    first, second = pipeline.evaluate(random_ids()), pipeline.evaluate(random_ids())
    assert first == second
    assert pipeline.traffic.per_token("forward") == 0 and not gradients(pipeline)


@pytest.mark.parametrize("options", [{}, {"bits": 4, "rounding": "stochastic"}])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_microbatch_size_changes_nothing_but_rounding(options, dropout):
    """Dropout and stochastic rounding belong to the sample, so even they agree."""
    found = []
    for size in (1, 2, 4):
        plain = make_pipeline("subspace", replace(TINY, dropout=dropout), rank=6, **options)
        pipeline = Pipeline(plain.stages, plain.codec, size, TINY.context)
        found.append((pipeline.step(random_ids(batch=4), 5, 100), gradients(pipeline)))
    for loss, parts in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-12)
        for name, gradient in parts.items():
            # A value on the edge of two 4-bit codes may fall either way when the scale of the loss share changes.
            assert relative(gradient, found[0][1][name]) < (1e-10 if not options else 0.2), name


@pytest.mark.parametrize("option", [{"dropout": 0.3}, {"output_dropout": 0.3}])
def test_dropout_does_not_depend_on_the_cut_and_is_off_in_evaluation(option):
    model = replace(TINY, **option)
    losses = [make_pipeline("dense", model, stages=stages).step(random_ids(), 3, 40) for stages in (1, 2, 4)]
    assert max(losses) - min(losses) < 1e-12
    pipeline = make_pipeline("dense", model)
    assert pipeline.step(random_ids(), 4, 40) != pytest.approx(losses[0], rel=1e-6)
    assert pipeline.evaluate(random_ids()) == pytest.approx(make_pipeline("dense").evaluate(random_ids()), rel=1e-12)


def test_tied_head_trains_one_matrix():
    pipeline = make_pipeline("dense", replace(TINY, tied_head=True))
    untied = make_pipeline("dense")
    with torch.no_grad():
        untied.stages[-1].head.weight.copy_(untied.stages[0].embedding.weight)
    assert pipeline.step(random_ids(), 0, 0) == pytest.approx(untied.step(random_ids(), 0, 0), rel=1e-12)
    assert "head.weight" not in gradients(pipeline)
    both = gradients(untied)
    assert relative(gradients(pipeline)["embedding.weight"], both["embedding.weight"] + both["head.weight"]) < 1e-12


def test_bf16_autocast_stays_close():
    exact = make_pipeline("subspace", rank=6, dtype="fp32")
    rounded = Pipeline(make_pipeline("subspace", rank=6, dtype="fp32").stages, exact.codec, 2, TINY.context, "bf16")
    assert rounded.step(random_ids(), 0, 0) == pytest.approx(exact.step(random_ids(), 0, 0), rel=0.02)
    assert all(gradient.dtype == torch.float32 for gradient in gradients(rounded).values())


def test_ids_that_all_stages_know_take_no_byte_and_change_nothing():
    plain = make_pipeline("subspace", stages=3, rank=4)
    known = Pipeline(make_pipeline("subspace", stages=3, rank=4).stages, plain.codec, plain.microbatch, TINY.context, known_ids=True)
    losses = [pipeline.step(random_ids(), 0, 0) for pipeline in (plain, known)]
    assert losses[0] == losses[1] and all(torch.equal(gradients(plain)[name], found) for name, found in gradients(known).items())
    for with_ids, without in zip(plain.boundaries, known.boundaries, strict=True):
        assert with_ids.meter.ids > 0 and without.meter.ids == 0
        assert with_ids.meter.forward - with_ids.meter.ids == without.meter.forward
        assert with_ids.meter.tokens == without.meter.tokens
