"""The largest or random values: what is kept, which gradient comes back, what it costs on the wire."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers import TINY, gradients, make_pipeline, random_ids
from thinwire.codecs.base import Codec
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context

both = pytest.mark.parametrize("name", ["topk", "randomk"])
per_group = pytest.mark.parametrize("per", ["token", "sample"])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(name: str, width: int = 32, seed: int = 5, **options) -> Codec:
    model = replace(TINY, width=width, heads=1, kv_heads=1)
    return make_codec(codec_defaults(name, **{"dtype": "fp32"} | options), model, seed=seed)


def ends(codec: Codec, cut: int = 2) -> tuple[torch.nn.Module, torch.nn.Module]:
    return codec.ends(StagePlan(0, 2, range(cut)))[1], codec.ends(StagePlan(1, 2, range(cut, 4)))[0]


def carry(codec: Codec, source: torch.Tensor, step: int = 0, first: int = 0, cut: int = 2) -> torch.Tensor:
    """Return what arrives of a stream, by way of bytes."""
    exit, entry = ends(codec, cut)
    context, ids = Context(step, torch.arange(first, first + len(source))), torch.zeros(source.shape[:2])
    specs = codec.spec(*source.shape[:2]).tensors
    sent = [codec.pack(slot, tensor, "forward") for slot, tensor in enumerate(exit(source, ids, context))]
    return entry(tuple(codec.unpack(slot, sent[slot], spec, "forward") for slot, spec in enumerate(specs)), ids, context)


@per_group
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_topk_keeps_the_largest_as_they_are(per, density):
    source = normal(3, 5, 32)
    received = carry(build("topk", density=density, per=per), source)
    groups = source if per == "token" else source.flatten(1)
    kept = round(density * groups.shape[-1])
    smallest = groups.abs().sort(descending=True).values[..., kept - 1 : kept]
    assert torch.equal(received.view_as(groups), groups.where(groups.abs() >= smallest, 0))


@both
@per_group
def test_gradient_is_the_dense_one_at_the_kept_positions_and_zero_elsewhere(name, per):
    codec = build(name, per=per)
    exit, entry = ends(codec)
    context, ids = Context(3, torch.arange(3)), torch.zeros(3, 5)
    source = normal(3, 5, 32).requires_grad_()
    received = entry(exit(source, ids, context), ids, context)
    dense = received.detach().requires_grad_()
    for stream in (received, dense):
        (stream @ normal(32, 8, seed=1)).tanh().sum().backward()
    kept = received.detach() != 0
    assert int(kept.sum()) == (3 * 5 * 3 if per == "token" else 3 * 16)
    assert torch.equal(source.grad != 0, kept)
    assert torch.equal(source.grad[kept], dense.grad[kept])


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 8), (3, 5, 32), (2, 7, 100), (1, 4, 512)])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("dtype, size", [("fp32", 4), ("bf16", 2)])
@per_group
def test_bytes_are_values_forward_and_back_and_the_shorter_coding_of_positions_forward(shape, density, dtype, size, per):
    batch, time, width = shape
    groups, count = (batch * time, width) if per == "token" else (batch, time * width)
    kept = max(1, round(density * count))
    positions = min(math.ceil(groups * kept * math.ceil(math.log2(count)) / 8), math.ceil(groups * count / 8))
    for name, index_bytes in (("topk", positions), ("randomk", 0)):
        codec = build(name, width, density=density, dtype=dtype, per=per)
        spec = codec.spec(batch, time)
        assert spec.bytes_per_token("forward") * batch * time == pytest.approx(groups * kept * size + index_bytes)
        assert spec.bytes_per_token("backward") * batch * time == pytest.approx(groups * kept * size)
        sent = ends(codec)[0](normal(*shape), torch.zeros(batch, time), Context(0, torch.arange(batch)))
        assert sum(len(codec.pack(slot, tensor, "forward")) for slot, tensor in enumerate(sent)) == groups * kept * size + index_bytes
        assert sum(len(codec.pack(slot, tensor, "backward")) for slot, tensor in enumerate(sent)) == groups * kept * size


def test_values_are_quantised_and_positions_are_not():
    spec = build("topk", bits=4).spec(3, 5)
    tokens, kept = 15, 3
    assert [tensor.forward_bytes for tensor in spec.tensors] == [
        math.ceil(tokens * kept * 4 / 8),
        tokens * 2,
        math.ceil(tokens * kept * 5 / 8),
    ]
    assert spec.tensors[2].backward_bytes == 0


def test_damaged_positions_are_refused():
    codec = build("topk", 20, density=0.1)
    spec = codec.spec(1, 1).tensors[1]
    assert codec.unpack(1, bytes([3 | 19 << 5 & 255, 19 >> 3]), spec, "forward").nonzero()[:, 2].tolist() == [3, 19]
    for first, second in ((3, 20), (4, 4), (5, 4)):
        with pytest.raises(ValueError, match="bytes where rising positions below 20"):
            codec.unpack(1, bytes([first | second << 5 & 255, second >> 3]), spec, "forward")


def test_damaged_bitmap_is_refused():
    codec = build("topk", 8, density=0.5)
    spec = codec.spec(1, 2).tensors[1]
    assert codec.unpack(1, bytes([0b1111, 0b11110000]), spec, "forward").sum() == 8
    with pytest.raises(ValueError, match="bytes where 4 ones in every 8 bits"):
        codec.unpack(1, bytes([0b11111, 0b1110000]), spec, "forward")


def test_gradient_of_a_mask_that_takes_bytes_is_refused():
    codec = build("topk")
    with pytest.raises(ValueError, match="3 bytes where 0 were declared"):
        codec.unpack(1, b"abc", codec.spec(1, 1).tensors[1], "backward")


def test_per_sample_lets_a_later_token_change_an_earlier_one_and_per_token_does_not():
    source = normal(1, 5, 32)
    louder = source.clone()
    louder[:, -1] *= 10
    token, sample = build("topk"), build("topk", per="sample")
    assert torch.equal(carry(token, source)[:, :-1], carry(token, louder)[:, :-1])
    assert not torch.equal(carry(sample, source)[:, :-1], carry(sample, louder)[:, :-1])


@per_group
def test_random_positions_belong_to_seed_step_sample_and_layer(per):
    source = torch.ones(4, 5, 32)
    codec = build("randomk", per=per)
    kept = carry(codec, source)
    assert torch.equal(kept, torch.cat([carry(codec, source[:1]), carry(codec, source[1:], first=1)]))
    others = [carry(codec, source, step=1), carry(codec, source, first=4), carry(codec, source, cut=3)]
    others.append(carry(build("randomk", per=per, seed=6), source))
    # Two independent draws of a tenth of the positions share a hundredth of them.
    assert all((kept * other).mean() < 0.03 for other in others)
    assert all((kept[0] * kept[row]).mean() < 0.06 for row in (1, 2, 3))


@per_group
def test_random_positions_are_spread_evenly(per):
    codec = build("randomk", density=0.25, per=per)
    kept = sum(carry(codec, torch.ones(20, 5, 32), step=step) for step in range(20)).sum(0)
    # 400 draws with probability a quarter: mean 100, deviation 8.7.
    assert kept.mean() == 100 and kept.min() > 50 and kept.max() < 150
    assert float(kept.std()) == pytest.approx(8.7, rel=0.25)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 17, 31])
@both
def test_a_value_that_is_not_finite_shows_in_its_token_alone(name, value, position):
    source = normal(2, 5, 32)
    source[0, 2, position] = value
    broken = ~carry(build(name, density=0.03), source).isfinite().all(-1)
    assert broken.nonzero().tolist() == [[0, 2]]


def test_nan_is_kept_before_infinity():
    source = torch.full((1, 1, 32), math.inf)
    source[..., 9] = math.nan
    assert carry(build("topk", density=0.03), source)[0, 0, 9].isnan()


@both
@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"warmup": 1}, {"per": "sample"}], ids=str)
def test_every_weight_in_front_of_the_boundary_learns(name, options):
    pipeline = make_pipeline(name, **options)
    for step in range(2):
        pipeline.step(random_ids(), step, 4 * step)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients(pipeline).values())


@both
@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, math.nan])
def test_a_share_that_is_none_is_refused(name, density):
    with pytest.raises(ValueError, match=rf"codec.density is {density}; choose a share of the values above 0 and up to 1"):
        build(name, density=density)
