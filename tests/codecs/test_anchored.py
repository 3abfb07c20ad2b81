"""The anchored boundary: what an anchor knows, the projector on its manifold, and one value on both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import MICROBATCH, TINY, make_pipeline, random_ids
from thinwire.codecs.anchored import Anchor, AnchoredOptions
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.projector import Learned, tangent
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.subspace.basis import random_basis

OPTIONS = AnchoredOptions(name="anchored", anchor_rank=4, buckets=64)


def test_full_rank_is_exact_at_the_start():
    """With K = D nothing is projected away, and all anchors start alike: the stream arrives as it left."""
    codec = make_codec(codec_defaults("anchored", rank=TINY.width, dtype="fp64"), TINY, seed=3, compute=torch.float64)
    exit = codec.ends(StagePlan(0, 2, range(2)))[1]
    entry = codec.ends(StagePlan(1, 2, range(2, 4)))[0]
    ids = random_ids()[:, :-1]
    stream = torch.randn(*ids.shape, TINY.width, dtype=torch.float64)
    embedded = entry.double().anchor(ids)
    payload = exit.double()(stream, ids, Context(0, torch.arange(4), kept={"embedded": embedded}))
    assert torch.allclose(entry(payload, ids, Context(0, torch.arange(4))), stream, atol=1e-12)


@pytest.mark.parametrize("projector", ["channels", "fixed", "learned"])
def test_what_is_sent_follows_the_formula(projector):
    """Z = (X - a[t]) A."""
    pipeline = make_pipeline("anchored", stages=3, split="1,2,1", rank=5, projector=projector)
    seen = {}
    entry, exit = pipeline.stages[1].entries["1"], pipeline.stages[1].exits["3"]
    exit.register_forward_hook(lambda module, inputs, output: seen.update(stream=inputs[0], ids=inputs[1], sent=output[0]))
    pipeline.evaluate(random_ids(batch=MICROBATCH))
    matrix = torch.eye(TINY.width, 5, dtype=torch.float64) if projector == "channels" else exit.projector.weight
    assert torch.allclose(seen["sent"], (seen["stream"] - entry.anchor(seen["ids"])) @ matrix, atol=1e-12)


def test_every_anchor_starts_as_the_embedding():
    pipeline = make_pipeline("anchored", stages=2, rank=4)
    anchor = pipeline.stages[1].entries["2"].anchor
    assert torch.equal(anchor.rows, pipeline.stages[0].embedding.weight)
    factorised = make_pipeline("anchored", stages=2, rank=4, anchors="factorised").stages[1].entries["2"].anchor
    ids = random_ids()
    assert torch.equal(factorised(ids), anchor(ids))


@pytest.mark.parametrize("anchors", ["full", "factorised"])
def test_ngram_anchors_see_the_tokens_before_and_none_after(anchors):
    anchor = Anchor(replace(OPTIONS, ngrams=3, anchors=anchors), TINY, 2, seed=0)
    torch.nn.init.normal_(anchor.ngrams[0])
    torch.nn.init.normal_(anchor.ngrams[1])
    ids = random_ids()[:1, :8]
    plain = anchor(ids)
    for place in range(8):
        changed = ids.clone()
        changed[0, place] = (changed[0, place] + 1) % TINY.vocabulary
        differs = (anchor(changed) != plain).any(-1)[0].tolist()
        assert differs == [place <= position <= place + 2 for position in range(8)]


def test_projector_stays_orthonormal_and_goes_downhill():
    """Learn the directions of most variance: the loss -|X A|^2 falls and A never leaves the manifold."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(500, 16, generator=generator) * torch.linspace(3, 0.1, 16)
    projector = Learned(random_basis(16, 3, seed=1).float(), rate=0.2)
    kept = []
    for _ in range(200):
        projector.weight.grad = None
        loss = -(data @ projector.weight).square().mean()
        loss.backward()
        projector.update(projector.weight.grad, 1.0)
        kept.append(-loss.item())
        assert (projector.weight.T @ projector.weight - torch.eye(3)).abs().max() < 1e-6
    best = torch.linalg.eigvalsh(data.T @ data / len(data))[-3:].sum() / 3
    assert kept[0] < 0.6 * best and kept[-1] > 0.99 * best


def test_tangent_directions_keep_the_columns_orthonormal_to_first_order():
    point = random_basis(16, 4, seed=2)
    along = tangent(torch.randn(16, 4, dtype=torch.float64), point)
    first_order = point.T @ along + along.T @ point
    assert first_order.abs().max() < 1e-12


def test_both_sides_hold_the_same_projector_and_only_the_owner_counts():
    pipeline = make_pipeline("anchored", stages=3, split="1,2,1", rank=4, projector="learned", projector_every=1)
    before = [stage.owned()[0].weight.clone() for stage in pipeline.stages[:-1]]
    pipeline.step(random_ids(), 0, 0)
    own, lent = (shared.weight.grad.clone() for shared in (pipeline.stages[0].owned()[0], pipeline.stages[1].copies()[0]))
    assert own.norm() > 0 and lent.norm() > 0
    sent = [boundary.meter.counts() for boundary in pipeline.boundaries]
    pipeline.update_shared(0, 1.0)
    for index, old in enumerate(before):
        owner, copy = pipeline.stages[index].owned()[0], pipeline.stages[index + 1].copies()[0]
        assert torch.equal(owner.weight, copy.weight) and not torch.equal(owner.weight, old)
        after = pipeline.boundaries[index].meter.counts()
        assert after["forward"] - sent[index]["forward"] == after["backward"] - sent[index]["backward"] == old.numel() * 8
    for stage in pipeline.stages:
        assert not any("projector" in name for name in stage.trained())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 0}, "codec.rank is 0; it can be 1 to the model width, 32"),
        ({"rank": 33}, "codec.rank is 33; it can be 1 to the model width, 32"),
        ({"ngrams": 0}, "codec.ngrams is 0; choose 1 or more"),
        ({"projector_rate": 0.0}, "codec.projector_rate is 0.0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_codec(codec_defaults("anchored", **options), TINY)
