"""Variations of entropy coding: noise that both ends know, rates by boundary, and a rate that the loss holds."""

from __future__ import annotations

import pytest
import torch

from coded import BATCH, TIME, WIDTH, Line, gaussian, normal
from helpers import TINY, make_pipeline, random_ids
from thinwire.bits.ladder import OCTAVE, step_size
from thinwire.codecs.aim import WEIGHT_RANGE, Aim
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.model.ends import Context


def test_dither_is_noise_over_one_step_that_depends_on_nothing():
    line = Line(rate=1.5, dither="forward")
    source, gradient, ids = gaussian(0, 0)
    output, *_ = line.cross(source, gradient, ids, step=0)
    step = step_size(int(line.ends[0].activations.number))
    errors = (output - source) / step
    assert errors.abs().max() <= 0.5 + 1e-3
    assert errors.std() == pytest.approx(12**-0.5, rel=0.1) and abs(errors.mean()) < 0.03
    assert abs(torch.corrcoef(torch.stack((errors.flatten(), source.flatten())))[0, 1]) < 0.1, "rounding of so few bits would not be"


def test_dithered_gradients_are_right_on_average_and_better_than_stochastic_rounding():
    source, gradient, ids = gaussian(0, 0)
    errors = {}
    for options in ({"dither": "backward"}, {"rounding": "stochastic"}):
        line = Line(rate=1.0, rate_penalty=0.0, **options)
        found = torch.stack([line.cross(source, gradient, ids, step)[1] for step in range(100)]) - gradient
        size = step_size(int(line.ends[1].gradients.number))
        assert found.mean(0).abs().max() < 6 * size / 100**0.5 / 2, "a mean of so many errors of half a step at most, in 6 deviations"
        errors[next(iter(options))] = float(found.std()) / size
    assert errors["dither"] < 0.8 * errors["rounding"]


def test_no_noise_where_nothing_is_learnt():
    """A validation has the values of plain rounding."""
    found = []
    for dither in ("none", "both"):
        line = Line(rate=1.5, dither=dither, dead_zone=0.5)
        found.append(line.cross(*gaussian(0, 0), step=0, training=False)[0])
    assert torch.equal(*found)


def test_both_ends_learn_alike_with_everything_on():
    line = Line(rate=1.5, dither="both", steer="penalty", boundary_rates="0.5")
    rates = line.train(40)
    first, second = line.states()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert rates[-1][1] == pytest.approx(0.75, rel=0.2), "half of the rate"


def test_rates_by_boundary():
    pipeline = make_pipeline("anchored", stages=4, rank=6, entropy=True, rate=2.0, backward_rate=1.0, boundary_rates="1.5/0.5")
    exits = [stage.exit.second.statistics for stage in pipeline.stages[:-1]]
    entries = [stage.entry.second.statistics for stage in pipeline.stages[1:]]
    for ends in (exits, entries):
        assert [(end.activations.aim.rate, end.gradients.aim.rate) for end in ends] == [(3.0, 1.5), (1.0, 0.5), (1.0, 0.5)]
    pipeline.step(random_ids(), 0, 0)


def test_a_settled_step_is_held_and_the_weight_moves():
    aim = Aim(1.0, None, settled=32)
    assert aim.next(5, 1.2, 1.0, age=40) == 5 and aim.next(5, 1.2, 1.0, age=32) > 5, "steered, then held"
    assert aim.next(5, 1.3, 1.0, age=40) > 5, "far above"
    assert aim.next_weight(0, 1.2, 32) == 0 and aim.next_weight(0, 1.2, 33) > 0 > aim.next_weight(0, 0.8, 33)
    assert aim.next_weight(WEIGHT_RANGE, 5.0, 40) == WEIGHT_RANGE


def test_the_weight_of_the_bits_rises_while_the_rate_is_too_high():
    """What a sender adds to its gradient grows, and with it goes into a checkpoint."""
    line = Line(rate=1.0, steer="penalty")

    def larger(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        source, gradient, ids = gaussian(step, number)
        return 1.2 * source, gradient, ids

    line.train(34)
    weight = int(line.ends[0].activations.weight)
    line.train(4, larger)
    assert int(line.ends[0].activations.weight) > weight
    assert line.exit.second.penalty() == pytest.approx(1.5e-3 * 2 ** (int(line.ends[0].activations.weight) / OCTAVE))
    assert "activations.weight" in line.states()[0] and "rate_penalty" in line.exit.second.figures()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rate": 1.0, "boundary_rates": "1,2"}, "codec.boundary_rates is '1,2'; write factors"),
        ({"rate": 1.0, "boundary_rates": "1/0"}, "factors of 0.05 to 20"),
        ({"bits": 3, "boundary_rates": "1/2"}, "codec.boundary_rates is 1/2, but no rate is held"),
        ({"bits": 3, "steer": "penalty"}, "codec.steer is penalty, but no rate is held"),
        ({"rate": 1.0, "steer": "penalty", "rate_penalty": 0.0}, "codec.steer is penalty, and codec.rate_penalty"),
        ({"entropy": False, "dither": "both"}, "codec.dither is both, but nothing is entropy-coded"),
    ],
)
def test_what_says_nothing_sensible_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_codec(codec_defaults("dense", **{"entropy": True} | options), TINY)


def test_shapes_are_those_of_the_values():
    line = Line(rate=1.0, dither="both")
    found = line.entry.second.dither(normal(BATCH, TIME, WIDTH), "forward", Context(3, torch.arange(BATCH)))
    assert found.shape == (BATCH, TIME, WIDTH) and found.min() >= 0 and found.max() < 1
