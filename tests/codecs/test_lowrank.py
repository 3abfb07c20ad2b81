"""The low-rank boundary: exact where the rank suffices, near the best elsewhere, its gradient that of a projection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import TINY, gradients, make_pipeline, random_ids, relative
from thinwire.codecs.base import DTYPES, Codec
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.lowrank import BASIS, FACTOR, dominant_basis
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.subspace.basis import random_basis


def build(dtype: str = "fp32", **options) -> Codec:
    compute = torch.float64 if dtype == "fp64" else torch.float32
    return make_codec(codec_defaults("lowrank", dtype=dtype, **options), TINY, seed=5, compute=compute)


def send(codec: Codec, stream: Tensor) -> tuple[Tensor, ...]:
    exit = codec.ends(StagePlan(0, 2, range(2)))[1]
    return exit(stream, torch.zeros(stream.shape[:2]), Context(0, torch.arange(len(stream))))


def receive(codec: Codec, payload: tuple[Tensor, ...]) -> Tensor:
    entry = codec.ends(StagePlan(1, 2, range(2, 4)))[0]
    return entry(payload, torch.zeros(payload[0].shape[:2]), Context(0, torch.arange(len(payload[0]))))


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_stream_of_that_rank_is_reproduced(rank):
    codec, source = build(rank=rank), gaussian(3, 12, rank) @ gaussian(3, rank, 32, seed=1)
    assert relative(receive(codec, send(codec, source)), source) < 1e-5


def test_gradient_is_that_of_the_projection():
    codec, source, gradient = build("fp64", rank=4), gaussian(3, 12, 32, dtype=torch.float64), gaussian(3, 12, 32, dtype=torch.float64)
    source.requires_grad_()
    sent = send(codec, source)
    arrived = tuple(tensor.detach().requires_grad_() for tensor in sent)
    receive(codec, arrived).backward(gradient)
    basis_BDK = arrived[BASIS].detach()
    assert torch.equal(arrived[BASIS].grad, torch.zeros_like(basis_BDK))
    torch.autograd.backward(sent, [tensor.grad for tensor in arrived])
    assert relative(basis_BDK.mT @ basis_BDK, torch.eye(4).double().expand(3, 4, 4)) < 1e-12
    assert relative(source.grad, gradient @ basis_BDK @ basis_BDK.mT) < 1e-12


@pytest.mark.parametrize("iterations, above", [(2, 1.25), (50, 1.001)])
def test_iterations_come_near_the_best_basis(iterations, above):
    strengths = 0.8 ** torch.arange(32)
    source = gaussian(4, 64, 32) * strengths
    best = torch.linalg.svdvals(source)[:, 8:].square().sum(-1).sqrt()
    basis_BDK = dominant_basis(source, random_basis(32, 8, 0), iterations).float()
    left = (source - source @ basis_BDK @ basis_BDK.mT).norm(dim=(1, 2))
    assert (left < above * best).all() and (left > 0.999 * best).all()


def test_bytes():
    plain = build("bf16", rank=3).spec(4, 12)
    assert plain.bytes_per_token("forward") * 12 == 3 * (12 + 32) * 2
    assert plain.bytes_per_token("backward") * 12 == 3 * 12 * 2
    coded = build("bf16", rank=3, bits=8).spec(4, 12)
    assert coded.bytes_per_token("forward") * 12 == 12 * (3 + 2) + 3 * 32 * 2
    assert coded.bytes_per_token("backward") * 12 == 12 * (3 + 2)
    pipeline = make_pipeline("lowrank", dtype="fp32", rank=3)
    pipeline.step(random_ids(), 0, 0)
    meter = pipeline.boundaries[0].meter
    assert meter.forward - meter.ids == 4 * 3 * (12 + 32) * 4 and meter.backward == 4 * 3 * 12 * 4


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_basis_keeps_the_format_of_the_wire(dtype, bits):
    sent = send(build(dtype, bits=bits), gaussian(3, 12, 32))
    assert sent[-1].dtype == DTYPES[dtype] and sent[-1].shape == (3, 32, 8)


def test_a_sample_does_not_depend_on_its_microbatch():
    codec, source = build("fp32", rank=4), gaussian(4, 12, 32)
    together = send(codec, source)
    for row in range(4):
        alone = send(codec, source[row : row + 1])
        assert relative(alone[FACTOR][0] @ alone[BASIS][0].T, together[FACTOR][row] @ together[BASIS][row].T) < 1e-5


def test_later_tokens_influence_earlier_ones():
    codec, source = build("fp32", rank=2), gaussian(1, 12, 32)
    changed = source.clone()
    changed[:, -1] *= 10
    first, second = receive(codec, send(codec, source)), receive(codec, send(codec, changed))
    assert relative(second[:, :-1], first[:, :-1]) > 0.1


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_spoils_its_token_only(value):
    codec, source = build("bf16"), gaussian(3, 12, 32)
    source[0, 3, 20] = value
    received = receive(codec, send(codec, source))
    bad = ~received.isfinite().all(-1)
    assert bad[0, 3] and bad.sum() == 1


def test_the_loss_trains_every_stage():
    pipeline = make_pipeline("lowrank", stages=3)
    pipeline.step(random_ids(), 0, 0)
    assert gradients(pipeline)["embedding.weight"].any()


@pytest.mark.parametrize("rank", [0, 13])
def test_other_ranks_are_refused(rank):
    with pytest.raises(ValueError, match=rf"codec.rank is {rank}; it can be 1 to 12, the lesser of model.width and model.context"):
        build(rank=rank)


def test_no_iterations_are_refused():
    with pytest.raises(ValueError, match=r"codec.iterations is 0; choose 1 or more"):
        build(iterations=0)


def test_bytes_for_a_basis_gradient_are_refused():
    codec = build()
    with pytest.raises(ValueError, match="payload of 1 bytes where none were declared"):
        codec.unpack(BASIS, b"\0", codec.spec(1, 2).tensors[BASIS], "backward")
