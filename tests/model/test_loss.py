"""Head and loss in one operation: the same numbers in less memory; and outputs that begin at zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers import TINY, gradients, make_pipeline, random_ids, relative
from thinwire.config.sections import RunConfig
from thinwire.memory.account import Live
from thinwire.model.loss import fused_loss
from thinwire.model.targets import IGNORED, Targets
from thinwire.run.check import check_architecture


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_logits(tied):
    plain = make_pipeline("dense", replace(TINY, tied_head=tied))
    fused = make_pipeline("dense", replace(TINY, tied_head=tied, fused_loss=True))
    batch_BT1 = random_ids()
    assert fused.step(batch_BT1, 0, 0) == pytest.approx(plain.step(batch_BT1, 0, 0), rel=1e-12)
    expected = gradients(plain)
    assert expected.keys() == gradients(fused).keys()
    assert all(relative(gradient, expected[name]) < 1e-10 for name, gradient in gradients(fused).items())
    assert fused.evaluate(batch_BT1) == pytest.approx(plain.evaluate(batch_BT1), rel=1e-12)


def test_it_takes_less_memory():
    head, targets_BT = nn.Linear(16, 30_000, bias=False), torch.zeros(4, 64, dtype=torch.int64)
    peaks = {}
    for name in ("plain", "fused"):
        hidden_BTD = torch.randn(4, 64, 16, requires_grad=True)
        with Live([hidden_BTD, head.weight]) as live:
            if name == "fused":
                loss = fused_loss(hidden_BTD, head.weight, Targets(targets_BT))
                assert loss is not None
            else:
                loss = nn.functional.cross_entropy(head(hidden_BTD).flatten(0, 1), targets_BT.flatten())
            loss.backward()
        peaks[name], head.weight.grad = live.peak, None
    assert peaks["fused"] < 0.6 * peaks["plain"]


@pytest.mark.parametrize("counted", [0, 5])
def test_tokens_that_do_not_count_are_left_out_alike(counted):
    generator = torch.Generator().manual_seed(0)
    hidden_BTD = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_VD, labels_BT = torch.randn(40, 16, generator=generator, dtype=torch.float64), torch.full((2, 8), IGNORED)
    labels_BT[0, :counted] = 7
    targets = Targets(labels_BT, torch.tensor(9), 0.5)
    fused, plain = fused_loss(hidden_BTD, weight_VD, targets), targets.loss(hidden_BTD @ weight_VD.T)
    assert fused is not None and float(fused.detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
    gradients_of = [torch.autograd.grad(loss, hidden_BTD)[0] for loss in (fused, plain)]
    assert torch.allclose(*gradients_of, rtol=1e-10, atol=1e-14)


def test_without_the_operation_the_logits_are_made(monkeypatch):
    monkeypatch.delattr(nn.functional, "linear_cross_entropy")
    fused, plain = (make_pipeline("dense", replace(TINY, fused_loss=on)) for on in (True, False))
    assert fused.step(random_ids(), 0, 0) == plain.step(random_ids(), 0, 0)


def test_a_cap_between_head_and_loss_is_refused():
    with pytest.raises(ValueError, match=r"model\.logit_cap 15\.0 stands between them; leave one out"):
        check_architecture(RunConfig(model=replace(TINY, fused_loss=True, logit_cap=15.0)))


@pytest.mark.parametrize("codec", ["dense", "subspace"])
def test_zero_outputs_begin_with_the_loss_of_guessing_and_learn(codec):
    pipeline = make_pipeline(codec, replace(TINY, zero_outputs=True), **({"rank": 6} if codec == "subspace" else {}))
    loss = pipeline.step(random_ids(), 0, 0)
    assert loss == pytest.approx(torch.log(torch.tensor(float(TINY.vocabulary), dtype=torch.float64)).item(), rel=1e-9)
    assert bool(gradients(pipeline)["head.weight"].any())
    zero = {name for stage in pipeline.stages for name, each in stage.named_parameters() if not bool(each.any())}
    assert zero == {"head.weight", *(f"layers.{layer}.{name}.weight" for layer in range(4) for name in ("attention.output", "ffn.down"))}
