"""The choice of the next token: its limits, its frequencies, its seed."""

from __future__ import annotations

import pytest
import torch

from thinwire.run.sampling import Sampler, Sampling

LOGITS_V = torch.tensor([0.3, 2.0, -1.0, 1.9, 0.0, 2.0])


def choices(count: int, **words) -> list[int]:
    sampler = Sampler(Sampling(**words))
    return [sampler(LOGITS_V) for _ in range(count)]


@pytest.mark.parametrize("words", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6, "top_k": 1}])
def test_the_narrowest_choice_is_the_likeliest_token(words):
    assert set(choices(20, **words)) == {1}


def test_frequencies_are_those_of_the_softmax():
    counts = torch.bincount(torch.tensor(choices(4000, temperature=0.7)), minlength=6) / 4000
    assert (counts - (LOGITS_V / 0.7).softmax(0)).abs().max() < 0.03


def test_top_k_and_top_p_leave_out_the_unlikely_ones():
    assert set(choices(300, top_k=3)) == {1, 3, 5}
    assert set(choices(300, top_p=0.65)) == {1, 3, 5}
    assert set(choices(300, top_p=0.31)) == {1, 5}


def test_the_same_seed_chooses_the_same():
    assert choices(50, seed=7) == choices(50, seed=7) != choices(50, seed=8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; choose 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0; choose 1"),
        ({"top_p": 1.5}, "top_p is 1.5; choose a number above 0"),
        ({"seed": -1}, "seed is -1; choose 0"),
    ],
)
def test_limits(words, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**words)


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        Sampler(Sampling())(torch.tensor([1.0, float("nan")]))
