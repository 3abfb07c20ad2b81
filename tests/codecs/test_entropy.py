"""Entropy-coded boundaries: both ends learn alike from what crossed, the rate is held, what is wrong is refused by name."""

from __future__ import annotations

import math

import pytest
import torch

from coded import BATCH, TIME, WIDTH, Line, gaussian, normal
from helpers import TINY, make_pipeline, random_ids
from thinwire.bits.entropy import LIMIT
from thinwire.codecs.base import Codec
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.entropy import HEADER, sampled
from thinwire.config.registry import CODECS
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context


def assert_same(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_both_ends_learn_the_same():
    line = Line(rate=1.5)
    line.train(9)
    assert_same(*line.states())
    before = line.states()[0]
    line.train(1)
    assert any(not torch.equal(before[name], tensor) for name, tensor in line.states()[0].items())


def test_the_order_of_microbatches_does_not_matter():
    first, second = Line(rate=1.5), Line(rate=1.5)
    for line in (first, second):
        line.train(3)
    for line, order in ((first, (0, 1, 2)), (second, (2, 0, 1))):
        for number in order:
            line.cross(*gaussian(7, number), 3)
        line.commit()
    assert_same(first.states()[0], second.states()[0])


def test_an_abandoned_step_and_an_evaluation_leave_nothing():
    first, second = Line(rate=1.5), Line(rate=1.5)
    for line in (first, second):
        line.train(3)
    second.cross(*gaussian(50, 0), 3)  # a step that is never committed
    second.cross(*gaussian(51, 0), 4, training=False)
    for line in (first, second):
        line.cross(*gaussian(8, 0), 5)
        line.commit()
    assert_same(first.states()[0], second.states()[0])


@pytest.mark.parametrize(("rate", "backward"), [(0.4, 1.0), (1.5, 2.5), (4.0, 0.7)])
def test_the_rate_is_held(rate, backward):
    rates = Line(rate=rate, backward_rate=backward, sample=0.0).train(40)[-10:]
    found = [sum(each) / len(rates) for each in zip(*rates, strict=True)]
    assert found == pytest.approx([rate, backward], rel=0.06)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_bits_keep_the_error_of_the_quantiser(bits):
    def error(output: torch.Tensor, source: torch.Tensor) -> float:
        return float((output - source).square().mean() / source.square().mean())

    line = Line(bits=bits, dead_zone=0.5)
    line.train(12)
    source, gradient, ids = gaussian(99, 0)
    (
        output,
        *_,
    ) = line.cross(source, gradient, ids, 99, training=False)
    plain = make_codec(codec_defaults("quantize", bits=bits), TINY)
    exit, entry = plain.ends(StagePlan(0, 2, range(2)))[1], plain.ends(StagePlan(1, 2, range(2, 4)))[0]
    context = Context(0, torch.arange(BATCH))
    wanted = error(entry(exit(source, ids, context), ids, context), source)
    assert 0.4 * wanted < error(output, source) < 1.6 * wanted


def test_prediction_and_rotation_save_bits():
    """At the same error: what is expected of a token costs nothing, and correlated channels are turned apart."""
    line = Line(bits=4)
    rates = [forward for forward, _ in line.train(20)]
    assert rates[-1] < 0.7 * rates[0]
    rotation = line.ends[0].activations.rotation_KK.double() / 2**30
    assert (rotation.T @ rotation - torch.eye(WIDTH)).abs().max() < 1e-6
    assert (rotation - torch.eye(WIDTH)).abs().max() > 0.1


def test_statistics_that_differ_are_refused():
    line = Line(rate=1.5)
    line.train(2)
    source, gradient, ids = gaussian(5, 0)
    (row,) = line.exit(source, ids, Context(2, torch.arange(BATCH), False))
    data = line.sender.pack(0, row, "forward")
    line.cross(source, gradient, ids, 2)
    line.ends[1].activations.commit()  # one end has learnt, the other has not
    with pytest.raises(ValueError, match="other statistics"):
        line.receiver.unpack(0, data, line.spec, "forward")


def test_codes_that_do_not_compress_go_as_they_are():
    line = Line(rate=1.5)
    row = torch.randint(-LIMIT + 1, LIMIT, (BATCH * TIME * WIDTH + 1,), generator=torch.Generator().manual_seed(0)).float()
    row[0] = 0
    data = line.sender.pack(0, row, "forward")
    assert len(data) == line.spec.forward_bytes == HEADER + 2 * BATCH * TIME * WIDTH
    assert torch.equal(line.receiver.unpack(0, data, line.spec, "forward"), row)


@pytest.mark.parametrize("data", [b"", b"\0\0", b"\0\0\0", b"\xff\x7f\0abcd", bytes(5000)])
def test_bytes_of_no_payload_are_refused(data):
    with pytest.raises(ValueError, match=r"payload|statistics"):
        Line(rate=1.5).receiver.unpack(0, data, Line(rate=1.5).spec, "forward")


def test_a_step_size_follows_when_the_stream_grows():
    line = Line(rate=2.0)
    rates = line.train(
        40, lambda step, number: tuple(1.05**step * each if index < 2 else each for index, each in enumerate(gaussian(step, number)))
    )
    assert rates[-1][0] == pytest.approx(2.0, rel=0.15)
    assert_same(*line.states())


def test_sampled_gradients_are_right_on_average():
    steps = normal(400, 50, 8, seed=3) * 0.2
    noise = torch.rand(400, 50, generator=torch.Generator().manual_seed(4))
    found = sampled(steps.expand(400, 50, 8), 3.0, noise)
    assert (found == 0).all(-1).float().mean() > 0.5
    assert float((found.mean((0, 1)) - steps.mean((0, 1))).abs().max()) < 0.02
    long = steps * 100
    assert torch.equal(sampled(long, 3.0, noise), long)
    assert sampled(torch.tensor([[[math.nan, 1.0]]]), 3.0, torch.tensor([[0.9]])).isnan().any()
    assert not sampled(torch.zeros(1, 1, 3), 3.0, torch.zeros(1, 1)).any()


def test_the_rate_penalty_is_the_slope_of_the_bits():
    line, free = Line(rate=1.5, rate_penalty=0.5), Line(rate=1.5, rate_penalty=0.0)
    for each in (line, free):
        each.train(3)
    source, gradient, ids = gaussian(9, 0)
    found, without = (each.cross(source, gradient, ids, 9)[1] for each in (line, free))
    model = line.ends[0].activations
    values = source.clone().requires_grad_()
    number, steps = model.in_steps(source, ids, Context(9, torch.arange(BATCH), False))
    size = 2 ** (number / 32)
    turned = values @ (model.rotation_KK.double() / 2**30).float()
    bits = (1 + 4 * (steps + (turned - turned.detach()) / size).square()).log2().sum() / 2
    (bits * 0.5 / (2 * BATCH * TIME)).backward()
    assert torch.allclose(found - without, values.grad, rtol=1e-3, atol=1e-3 * float(values.grad.abs().max()))


def test_nothing_else_changes_in_the_first_step():
    """Before any step was committed there is nothing to divide a penalty by."""
    results = [Line(rate=1.5, rate_penalty=penalty).cross(*gaussian(0, 0), 0)[1] for penalty in (0.0, 1.0)]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"codec.entropy needs codec.rate"),
        ({"rate": 0.0}, r"codec.rate is 0.0; choose 0.05 to 12"),
        ({"rate": 1.0, "backward_rate": 99.0}, r"codec.backward_rate is 99.0"),
        ({"rate": 1.0, "bits": 4}, r"codec.rate and codec.bits both"),
        ({"rate": 1.0, "backward_rate": 1.0, "backward_bits": 4}, r"codec.backward_rate and codec.backward_bits both"),
        ({"bits": 5}, r"codec.bits is 5"),
        ({"rate": 1.0, "dead_zone": 0.2}, r"codec.dead_zone is 0.2"),
        ({"rate": 1.0, "rate_penalty": -1.0}, r"codec.rate_penalty is -1.0"),
        ({"rate": 1.0, "sample": -1.0}, r"codec.sample is -1.0"),
        ({"entropy": False, "rate": 1.0}, r"codec.rate is 1.0, but nothing is entropy-coded"),
        ({"entropy": False, "sample": 2.0}, r"codec.sample is 2.0, but nothing is entropy-coded"),
    ],
)
def test_options_that_say_nothing_sensible_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Line(**options)


@pytest.mark.parametrize("name", ["quantize", "lossless", "topk", "threshold", "lowrank"])
def test_codecs_that_send_no_plain_row_are_refused(name):
    assert name in CODECS.names()
    with pytest.raises(ValueError, match=f"`{name}` does not send a row of plain values"):
        make_codec(codec_defaults(name, entropy=True, rate=None if name == "quantize" else 1.0), TINY)


def test_gradients_may_have_an_aim_of_another_kind():
    aims = Line(rate=1.0, backward_bits=3).codec.second.aims
    assert (aims["forward"].rate, aims["backward"].rate, aims["backward"].bits) == (1.0, None, 3)
    assert Line(bits=3, backward_rate=2.0).codec.second.aims["backward"].rate == 2.0


def test_ids_are_coded_and_counted():
    pipeline = make_pipeline("subspace", stages=2, dtype="fp32", rank=4, entropy=True, rate=1.5)
    ids = random_ids(batch=4) % 3
    taken = []
    for step in range(6):
        before = pipeline.boundaries[0].meter.ids
        pipeline.step(ids, step, 0)
        pipeline.update_shared(step, 1.0)
        taken.append(pipeline.boundaries[0].meter.ids - before)
    assert taken[-1] < 0.5 * taken[0] < 2 * ids.numel()


def test_a_codec_without_its_end_does_not_pack():
    line = Line(rate=1.0)
    assert isinstance(line.codec, Codec)
    with pytest.raises(AssertionError, match="with_end"):
        line.codec.pack(0, torch.zeros(3), "forward")
