"""Test 6 of the method: `fixed` has the same bits on every machine, cached or not; all stages agree."""

from __future__ import annotations

import hashlib

import pytest
import torch

from helpers import make_pipeline
from thinwire.model.subspace.fixed import FixedFeatures
from thinwire.pipeline.inprocess import Pipeline

IDS = torch.tensor([0, 1, 255, 256, 65535, 49_999])


def features(cache_bytes: int = 0, width: int = 64, seed: int = 7, vocabulary: int = 65_536) -> FixedFeatures:
    return FixedFeatures(vocabulary, width, 0.5, seed, cache_bytes, torch.float32)


def test_golden_value():
    bits = (features().compute(IDS) < 0).to(torch.uint8)
    assert hashlib.sha256(bits.numpy().tobytes()).hexdigest() == "c8f3a13bdaa5852367c53c92a920155d00b7f7b836d588cd4f10cf7c161d5c29"


def test_table_holds_the_same_values():
    ids = torch.arange(1000)
    cached = features(cache_bytes=2**30, vocabulary=1000)
    assert cached.table_VD is not None
    assert torch.equal(cached(ids), features(vocabulary=1000)(ids))


def test_no_table_without_memory_for_it():
    assert features().table_VD is None
    assert sum(buffer.numel() for buffer in features().buffers()) == 256 * 8


@pytest.mark.parametrize("width", [1, 31, 33, 100])
def test_any_width(width):
    values = features(width=width).compute(IDS)
    assert values.shape == (6, width)
    assert torch.equal(values, features(width=128).compute(IDS)[:, :width])
    assert set(values.unique().tolist()) <= {-0.5, 0.5}


def test_signs_are_balanced_and_independent():
    values = features(width=256, vocabulary=4096).compute(torch.arange(4096)).double() / 0.5
    assert abs(values.mean()) < 0.005
    singular = torch.linalg.svdvals(values)
    assert singular[0] / singular[-1] < 1.8  # a random +-1 matrix of this shape: (1 + 1/4) / (1 - 1/4) = 1.67
    assert not torch.equal(values, features(width=256, vocabulary=4096, seed=8).compute(torch.arange(4096)) / 0.5)


def test_stages_that_disagree_do_not_start():
    pipeline = make_pipeline("subspace", stages=2, rank=6)
    pipeline.stages[1].stream.basis_DK[0, 0] += 1e-9
    with pytest.raises(ValueError, match="do not agree on basis"):
        Pipeline(pipeline.stages, pipeline.codec, 2, 12)
