"""Every family and kind of rotary positions against transformers: the same logits near and far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf.families import FAMILIES, ROPES, in_fp64, make_config, make_model, our_stages, predict, random_tokens

transformers = pytest.importorskip("transformers")
TIMES = (12, 40)
"""Tokens of short sequences: the longer one goes past `max_position_embeddings`, 24, and every window."""
FAR = 1200
MATRIX = [(family, rope, False) for family in FAMILIES for rope in ROPES] + [(family, "default", True) for family in FAMILIES]
SAMPLED = {"default", "dynamic", "yarn, all its words"}


def folder_of(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def exact_logits(model: Any, config: Any, ids_BT: Tensor) -> Tensor:
    """Return the logits of the same weights in transformers with everything in fp64."""
    with in_fp64(config.model_type), torch.no_grad():
        exact = make_model(config, dtype=torch.float64)
        exact.load_state_dict(model.state_dict())
        logits = exact(ids_BT).logits
    assert logits.dtype == torch.float64
    return logits


@pytest.mark.parametrize("family, rope, tied", MATRIX)
def test_in_fp64_the_network_is_that_of_transformers(tmp_path, family, rope, tied):
    config = make_config(family, rope, tie_word_embeddings=tied)
    model = make_model(config)
    stages = our_stages(folder_of(model, tmp_path / "folder"), 1 if tied else 3, "fp64")
    for time in TIMES:
        expected = exact_logits(model, make_config(family, rope, tie_word_embeddings=tied), random_tokens(time))
        assert (predict(stages, random_tokens(time)) - expected).abs().max() < 1e-11 * expected.abs().max(), time


@pytest.mark.parametrize("family, rope, tied", MATRIX)
def test_near_logits_are_those_of_transformers(tmp_path, family, rope, tied):
    """With weights as large as transformers draw them: larger ones let fp32 itself be off by more than 1e-6."""
    model = make_model(make_config(family, rope, tie_word_embeddings=tied, initializer_range=0.02))
    stages = our_stages(folder_of(model, tmp_path / "folder"), 1 if tied else 3)
    for time in TIMES:
        with torch.no_grad():
            theirs = model(random_tokens(time)).logits
        assert (predict(stages, random_tokens(time)) - theirs).abs().max() < 1e-6 * theirs.abs().max(), time


@pytest.mark.parametrize("rope", [rope if rope in SAMPLED else pytest.param(rope, marks=pytest.mark.full) for rope in ROPES])
@pytest.mark.parametrize("family", FAMILIES)
def test_far_logits_are_near_fp64_or_no_further_from_it_than_those_of_transformers(tmp_path, family, rope):
    model, ids_BT = make_model(make_config(family, rope)), random_tokens(FAR, 1)
    expected = exact_logits(model, make_config(family, rope), ids_BT)
    with torch.no_grad():
        theirs = model(ids_BT).logits.double()
    ours = predict(our_stages(folder_of(model, tmp_path / "folder")), ids_BT).double()
    ours_off, theirs_off = ((logits - expected).abs().max() / expected.abs().max() for logits in (ours, theirs))
    assert ours_off < 1e-5 or ours_off <= theirs_off
