"""The rotation in front of the quantiser: orthonormal, the same at both ends, and worth it where one channel is large."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import TINY, relative
from thinwire.bits.grid import make_grid
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.hadamard import HadamardEntry, HadamardExit, transform
from thinwire.config.registry import CODECS
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context

WIDE = ModelConfig(vocabulary=97, width=256, layers=4, heads=4, kv_heads=2, ffn=48, context=12)


def ends(name: str, model: ModelConfig = TINY, seed: int = 5, **options):
    codec = make_codec(codec_defaults(name, **options), model, seed=seed)
    return codec.ends(StagePlan(0, 2, range(2)))[1], codec.ends(StagePlan(1, 2, range(2, 4)))[0]


def cross(exit, entry, stream: Tensor) -> Tensor:
    ids, context = torch.zeros(stream.shape[:2]), Context(0, torch.arange(len(stream)))
    return entry(exit(stream, ids, context), ids, context)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_transform_is_that_of_hadamard():
    pair = torch.tensor([[1.0, 1], [1, -1]])
    assert torch.allclose(transform(torch.eye(8)) * 8**0.5, torch.kron(torch.kron(pair, pair), pair))


@pytest.mark.parametrize("width, block", [(32, 32), (48, 16), (6, 2), (256, 256)])
def test_it_is_orthonormal_in_blocks(width, block):
    matrix_DD = transform(torch.eye(width, dtype=torch.float64))
    assert torch.allclose(matrix_DD @ matrix_DD.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    assert torch.equal(matrix_DD != 0, torch.block_diag(*[torch.ones(block, block)] * (width // block)).bool())


def test_the_rotation_keeps_the_norm_and_is_undone():
    exit, entry = ends("hadamard", bits=None, dtype="fp32")
    stream = gaussian(3, 5, 32)
    rotated = exit(stream, torch.zeros(3, 5), Context(0, torch.arange(3)))[0]
    assert torch.allclose(rotated.norm(dim=-1), stream.norm(dim=-1), rtol=1e-6)
    assert relative(cross(exit, entry, stream), stream) < 1e-6
    assert relative(rotated, stream) > 0.5


def test_signs_belong_to_seed_and_boundary():
    codecs = [CODECS.load("hadamard")(codec_defaults("hadamard"), TINY, seed=seed) for seed in (5, 6)]
    assert torch.equal(codecs[0].signs(2), codecs[0].signs(2))
    assert not torch.equal(codecs[0].signs(2), codecs[0].signs(3)) and not torch.equal(codecs[0].signs(2), codecs[1].signs(2))
    assert set(codecs[0].signs(2).tolist()) == {-1.0, 1.0}


def test_one_large_channel_spoils_the_others_less():
    stream = gaussian(4, 12, 256)
    stream[..., 7] *= 50
    others = torch.arange(256) != 7
    errors, lost = {}, {}
    for name in ("quantize", "hadamard"):
        received = cross(*ends(name, WIDE, bits=4), stream)
        errors[name], lost[name] = relative(received, stream), relative(received[..., others], stream[..., others])
    assert errors["hadamard"] < errors["quantize"] / 2.5
    assert lost["quantize"] > 0.8 and lost["hadamard"] < 0.4


def test_the_gradient_is_quantised_where_it_is_rotated():
    exit, entry = ends("hadamard", bits=4, rounding="nearest")
    assert isinstance(exit.first, HadamardExit) and isinstance(entry.first, HadamardEntry)
    ids, context, stream = torch.zeros(3, 5), Context(0, torch.arange(3)), gaussian(3, 5, 32).requires_grad_()
    sent = exit(stream, ids, context)
    arrived = tuple(tensor.detach().requires_grad_() for tensor in sent)
    gradient = gaussian(3, 5, 32, seed=1)
    gradient[..., 7] *= 50
    entry(arrived, ids, context).backward(gradient)
    grid, signs_D = make_grid(4), entry.first.signs_D
    codes, scales = grid.quantize(transform(gradient * signs_D))
    assert torch.equal(arrived[0].grad, codes) and torch.equal(arrived[1].grad, scales)
    torch.autograd.backward(sent, [tensor.grad for tensor in arrived])
    assert relative(stream.grad, transform(grid.dequantize(codes, scales, torch.float32)) * signs_D) < 1e-6


def test_bytes_are_those_of_the_quantiser():
    spec = make_codec(codec_defaults("hadamard"), TINY).spec(3, 4)
    assert spec.bytes_per_token("forward") == spec.bytes_per_token("backward") == 32 / 2 + 2
