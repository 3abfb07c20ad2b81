"""Cutting layers into stages."""

from __future__ import annotations

import pytest

from thinwire.model.cut import cut_layers


@pytest.mark.parametrize(
    "layers, stages, split, counts",
    [(8, 4, None, [2, 2, 2, 2]), (8, 3, None, [3, 3, 2]), (8, 4, "2,2,3,1", [2, 2, 3, 1]), (5, 1, None, [5]), (4, 4, None, [1] * 4)],
)
def test_every_layer_stands_in_one_stage(layers, stages, split, counts):
    ranges = cut_layers(layers, stages, split)
    assert [len(part) for part in ranges] == counts
    assert [layer for part in ranges for layer in part] == list(range(layers))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((8, 9), "pipeline.stages is 9 for 8 layers; choose 1 to 8"),
        ((8, 0), "pipeline.stages is 0"),
        ((8, 4, "2,2,3"), "names 3 stages, pipeline.stages is 4"),
        ((8, 4, "2,2,3,2"), "adds up to 9 layers, the model has 8"),
        ((8, 4, "3,3,2,0"), "at least one"),
        ((8, 4, "2;2;2;2"), "write layers per stage with commas"),
    ],
)
def test_impossible_cuts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cut_layers(*arguments)
