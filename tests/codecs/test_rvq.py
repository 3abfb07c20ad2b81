"""Residual vector quantisation: codebooks that are learnt at one end and equal at both."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY, make_pipeline, random_ids
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.rvq import Codebook
from thinwire.config.sections import TrainConfig
from thinwire.optim.optimizers import StageOptimizer, clip_scale


def clusters(count: int, seed: int) -> torch.Tensor:
    """Return vectors near 16 points."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(16, 4, generator=torch.Generator().manual_seed(99))
    return centres[torch.randint(0, 16, (count,), generator=generator)] + 0.05 * torch.randn(count, 4, generator=generator)


def book(levels: int = 2, size: int = 16) -> Codebook:
    weight = torch.randn(levels, size, 5, generator=torch.Generator().manual_seed(1))
    weight[..., -1] = 0
    return Codebook(weight)


def test_codes_stand_for_the_sum_of_their_vectors():
    codebook, vectors = book(), clusters(50, 0)
    codes, near, found = codebook.encode(vectors)
    assert torch.allclose(codebook.decode(codes, torch.float32), near, atol=1e-6)
    assert found[..., -1].sum(1).tolist() == [50, 50]
    nearest = torch.cdist(vectors, codebook.weight[0, :, :-1]).argmin(1)
    assert torch.equal(codes[:, 0], nearest)


def test_updates_move_entries_to_where_vectors_are():
    codebook = book()
    before = float((codebook.encode(clusters(500, 0))[1] - clusters(500, 0)).square().mean())
    for number in range(12):
        codebook.update(codebook.encode(clusters(500, number))[2], 1.0)
    vectors = clusters(500, 77)
    after = float((codebook.encode(vectors)[1] - vectors).square().mean())
    assert after < 0.1 * before
    assert (codebook.weight[..., -1] > 0).all(), "no entry is left unused"


def test_an_update_of_nothing_changes_nothing():
    codebook = book()
    before = codebook.weight.detach().clone()
    codebook.update(torch.zeros_like(before), 1.0)
    assert torch.equal(codebook.weight, before)


def test_both_ends_hold_the_same_codebooks_and_bytes_are_codes_and_scales():
    pipeline = make_pipeline("rvq", group=4, levels=3, code_bits=5, dtype="fp32")
    first = pipeline.stages[0].exit.activations.weight.detach().clone()
    for step in range(3):
        pipeline.step(random_ids(seed=step), step, 0)
        sent = pipeline.boundaries[0].meter.backward
        pipeline.update_shared(step, 1.0)
    exit, entry = pipeline.stages[0].exit.state_dict(), pipeline.stages[1].entry.state_dict()
    assert exit.keys() == entry.keys() and all(torch.equal(exit[name], entry[name]) for name in exit)
    assert not torch.equal(exit["activations.weight"], first) and exit["gradients.weight"][..., -1].any()
    codes = pipeline.codec.spec(2, TINY.context)
    assert codes.bytes_per_token("forward") == TINY.width // 4 * 3 * 5 / 8 + 2
    assert pipeline.boundaries[0].meter.backward - sent == 2 * first.nbytes, "updates are counted"


def test_it_is_updated_often_at_first_and_then_now_and_then():
    codec = make_codec(codec_defaults("rvq", codebook_every=20), TINY)
    assert [step for step in range(60) if codec.shares_after(step)] == [*range(8), 19, 39, 59]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"group": 5}, "codec.group is 5; choose a divisor of the model width, 32"),
        ({"levels": 0}, "codec.levels is 0"),
        ({"code_bits": 9}, "codec.code_bits is 9"),
        ({"codebook_every": 0}, "codec.codebook_every is 0"),
        ({"bits": 4}, "codec.bits is 4, but `rvq` sends codes"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_codec(codec_defaults("rvq", **options), TINY)


@pytest.mark.full
def test_learnt_codebooks_train_better_than_drawn_ones():
    losses = {}
    for learnt in (True, False):
        pipeline = make_pipeline("rvq", group=8, levels=1, code_bits=8)
        optimizers = [StageOptimizer(stage, TrainConfig(rate=0.003)) for stage in pipeline.stages]
        for step in range(150):
            loss = pipeline.step(random_ids(seed=step), step, 0)
            norm = sum(each.squared_norm() for each in optimizers) ** 0.5
            for each in optimizers:
                each.step(1.0, clip_scale(norm, 1.0))
            if learnt:
                pipeline.update_shared(step, 1.0)
            losses.setdefault(learnt, []).append(loss)
    assert sum(losses[True][-20:]) < sum(losses[False][-20:])
