"""Gradients that are no numbers: a step that diverged leaves no trace in what decides where the subspace moves."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import make_pipeline, random_ids
from thinwire.model.subspace.drift import propose


def measured(value: float | None = None):
    """Return the last stage's stream after two steps, between which a gradient held one such value."""
    pipeline = make_pipeline("subspace", stages=2, rank=6, dtype="fp32", drift_every=100)
    stream = pipeline.stages[-1].stream
    pipeline.step(random_ids(seed=0), 0, 0)
    if value is not None:
        gradient_BTD = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
        gradient_BTD[1, 3, 5] = value
        stream._accumulate(gradient_BTD)
    pipeline.step(random_ids(seed=1), 1, 4)
    return stream


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_a_gradient_that_is_no_number_leaves_the_energy_as_it_was(value):
    calm, struck = measured(), measured(value)
    assert calm.energy_DD.any() and torch.equal(struck.energy_DD, calm.energy_DD)
    assert torch.equal(propose(struck, 0.3), propose(calm, 0.3))


def test_ordinary_gradients_are_counted():
    assert not torch.equal(measured(1.0).energy_DD, measured().energy_DD)


def test_an_energy_that_is_no_number_moves_nothing_and_is_forgotten():
    """As a checkpoint may hold it."""
    stream = measured()
    stream.energy_DD[3, 4] = math.nan
    assert torch.equal(propose(stream, 0.3), stream.basis_DK)
    assert not stream.energy_DD.any()
