"""What a stage draws at the start comes from (seed, name) and (seed, place) alone, and leaves the process's generator alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import make_pipeline, parameters
from thinwire.config.registry import CODECS
from thinwire.model.initial import OwnGenerator


def drawn() -> list[torch.Tensor]:
    """Draw in every way in which modules do."""
    filled = [nn.init.xavier_uniform_(torch.empty(9, 9)), nn.init.orthogonal_(torch.empty(4, 4)), torch.empty(20).bernoulli_(0.5)]
    return [nn.Linear(30, 40).weight, nn.Embedding(30, 4).weight, torch.randn(3), torch.randint(9, (30,)), torch.randperm(9), *filled]


def test_a_generator_of_its_own_draws_what_the_shared_one_draws_for_that_seed():
    before = torch.get_rng_state()
    with OwnGenerator(5):
        own = drawn()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        shared = drawn()
    assert all(torch.equal(one, other) for one, other in zip(own, shared, strict=True))


@pytest.mark.parametrize("name", CODECS.names())
def test_building_stages_neither_asks_nor_moves_the_shared_generator(name):
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        starts.append(parameters(make_pipeline(name, dtype="fp32")))
        assert torch.equal(torch.get_rng_state(), before)
    first, second = starts
    assert all(torch.equal(tensor, second[label]) for label, tensor in first.items())
