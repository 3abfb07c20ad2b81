"""What the subspace codec refuses, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers import TINY, make_pipeline, random_ids
from thinwire.codecs.build import codec_defaults, make_codec


@pytest.mark.parametrize("option", [{"output_dropout": 0.1}, {"branch_norm_gains": True}, {"tied_head": True}])
def test_options_that_leave_the_subspace_are_refused_by_name(option):
    (name,) = option
    with pytest.raises(ValueError, match=rf"model.{name} = .* would leave the subspace.*dense"):
        make_codec(codec_defaults("subspace", rank=4), replace(TINY, **option))
    assert make_pipeline("dense", replace(TINY, **option)).step(random_ids(), 0, 0) > 0


@pytest.mark.parametrize("rank", [0, 33])
def test_impossible_rank_is_refused(rank):
    with pytest.raises(ValueError, match=rf"codec.rank is {rank}; it can be 1 to the model width, 32"):
        make_codec(codec_defaults("subspace", rank=rank), TINY)


def test_full_rank_is_still_the_subspace_method():
    pipeline = make_pipeline("subspace", rank=32)
    assert pipeline.step(random_ids(), 0, 0) > 0
    assert pipeline.stages[0].axes.keys() == make_pipeline("subspace", rank=31).stages[0].axes.keys() != set()


@pytest.mark.parametrize("option", [{"fixed_scale": 0.0}, {"fixed_cache_mb": -1.0}, {"drift_every": -3}, {"drift_rate": float("nan")}])
def test_impossible_options_are_refused_by_name(option):
    (name,) = option
    with pytest.raises(ValueError, match=rf"codec.{name} is .*; choose a number"):
        make_codec(codec_defaults("subspace", rank=4, **option), TINY)
