"""Test 3 of the method: coordinates with the shared second moment are the published projected form; and the schedule."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import make_pipeline, parameters, random_ids, relative
from oracle import ProjectedAdamW, fixed_table, wide_form
from thinwire.config.sections import TrainConfig
from thinwire.optim.optimizers import StageOptimizer, clip_scale, muon_momentum, rate_factor


def run_both(steps: int, train: TrainConfig):
    """Train coordinates and the projected oracle side by side in fp64."""
    narrow = make_pipeline("subspace", stages=2, rank=6)
    wide = wide_form(narrow)
    oracle = ProjectedAdamW(wide, narrow, train)
    optimizers = [StageOptimizer(stage, train) for stage in narrow.stages]
    clipped = 0
    for step in range(steps):
        batch = random_ids(seed=step)
        losses = narrow.step(batch, step, 4 * step), wide.step(batch, step, 4 * step)
        norm = sum(optimizer.squared_norm() for optimizer in optimizers) ** 0.5
        clipped += clip_scale(norm, train.clip) < 1
        for optimizer in optimizers:
            optimizer.step(rate_factor(step, train), clip_scale(norm, train.clip))
        oracle.step()
    return narrow, wide, losses, clipped


def test_shared_adamw_in_coordinates_is_the_published_optimizer():
    train = TrainConfig(steps=50, warmup=5, weight_decay=0.1, clip=0.5, rate=3e-3)
    narrow, wide, losses, clipped = run_both(50, train)
    assert clipped > 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    basis, there = narrow.stages[0].stream.basis_DK, parameters(wide)
    for stage in narrow.stages:
        for name, value in stage.named_parameters():
            if name == "embedding.weight":
                value = fixed_table(narrow) + value @ basis.T
            elif name in stage.axes:
                value = basis @ value
            assert relative(value, there[name]) < 1e-8, name


def test_dividing_by_the_rank_instead_would_be_noticed(monkeypatch):
    """The oracle must tell D from K: with the wrong divisor the weights differ."""
    from thinwire.optim import optimizers as module

    plain = module.SharedAdamW.__init__
    monkeypatch.setattr(module.SharedAdamW, "__init__", lambda self, groups, width, betas, eps: plain(self, groups, 6, betas, eps))
    narrow, wide, _, _ = run_both(10, TrainConfig(steps=50, warmup=5))
    basis = narrow.stages[0].stream.basis_DK
    name = "layers.0.ffn.down.weight"
    assert relative(basis @ parameters(narrow)[name], parameters(wide)[name]) > 1e-3


@pytest.mark.parametrize("optimizer", ["shared", "adamw", "muon"])
@pytest.mark.parametrize("codec", ["dense", "subspace"])
def test_every_optimizer_learns(codec, optimizer):
    pipeline = make_pipeline(codec, dtype="fp32", **({"rank": 6} if codec == "subspace" else {}))
    train = TrainConfig(steps=60, warmup=5, optimizer=optimizer, rate=1e-2)
    optimizers = [StageOptimizer(stage, train) for stage in pipeline.stages]
    losses = []
    for step in range(60):
        losses.append(pipeline.step(random_ids(seed=0, batch=8), step, 8 * step))
        for each in optimizers:
            each.step(rate_factor(step, train), 1.0)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("optimizer", ["shared", "adamw", "muon"])
def test_state_survives_save_and_load(optimizer):
    train = TrainConfig(optimizer=optimizer)

    def steps(pipeline, each, numbers):
        for step in numbers:
            pipeline.step(random_ids(seed=step), step, 4 * step)
            for one in each:
                one.step(1.0, 1.0)

    first = make_pipeline("subspace", rank=6)
    optimizers = [StageOptimizer(stage, train) for stage in first.stages]
    steps(first, optimizers, range(3))
    second = make_pipeline("subspace", rank=6)
    copies = [StageOptimizer(stage, train) for stage in second.stages]
    for old, new, before, after in zip(first.stages, second.stages, optimizers, copies, strict=True):
        new.load_state_dict(old.state_dict())
        after.load_state_tensors(before.state_tensors())
    steps(first, optimizers, range(3, 6))
    steps(second, copies, range(3, 6))
    for name, value in parameters(first).items():
        assert torch.equal(value, parameters(second)[name]), name


def test_rate_schedule():
    train = TrainConfig(steps=100, warmup=10, decay=0.2)
    factors = [rate_factor(step, train) for step in range(100)]
    assert factors[0] == 0.1 and factors[9:80] == [1.0] * 71
    assert factors[99] == pytest.approx(0.05) and factors[80:] == sorted(factors[80:], reverse=True)
    assert rate_factor(0, TrainConfig(warmup=0)) == 1.0


def test_cosine_and_floor():
    train = TrainConfig(steps=100, warmup=10, schedule="cosine", floor=0.1)
    factors = [rate_factor(step, train) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == factors[10] == 1.0
    assert factors[55] == pytest.approx(0.1 + 0.9 * 0.5) and 0.1 < factors[99] < 0.101
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert rate_factor(99, TrainConfig(steps=100, warmup=10, floor=0.5)) == pytest.approx(0.5 + 0.5 * 0.05)


def test_momentum_of_muon_grows():
    train = TrainConfig(muon_warmup=4)
    assert [muon_momentum(step, train) for step in (0, 2, 4, 100)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert muon_momentum(0, TrainConfig()) == 0.95
    pipeline = make_pipeline("dense")
    optimizer = StageOptimizer(pipeline.stages[0], TrainConfig(optimizer="muon"))
    pipeline.step(random_ids(), 0, 0)
    optimizer.step(1.0, 1.0, 0.85)
    momenta = [group["momentum"] for each in optimizer.optimizers for group in each.param_groups if "momentum" in group]
    assert momenta and set(momenta) == {0.85}


def test_groups_have_rates_of_their_own():
    train = TrainConfig(optimizer="muon", rate=1e-3, muon_rate=0.02, embedding_rate=0.3, head_rate=0.004, vector_rate=0.05)
    found = {}
    for stage in make_pipeline("dense").stages:
        optimizer = StageOptimizer(stage, train)
        optimizer.step(0.5, 1.0)
        names = {id(parameter): name for name, parameter in optimizer.named.items()}
        found |= {names[id(g["params"][0])]: g["lr"] for each in optimizer.optimizers for g in each.param_groups}
    assert found["embedding.weight"] == 0.15 and found["head.weight"] == 0.002 and found["norm.weight"] == 0.025
    assert found["layers.2.ffn.up.weight"] == 0.01 and found["layers.2.ffn_norm.weight"] == 0.025


@pytest.mark.parametrize("optimizer", ["shared", "adamw", "muon"])
def test_the_running_mean_follows_the_weights_and_changes_none(optimizer):
    weights = []
    for decay in (0.0, 0.75):
        pipeline = make_pipeline("subspace", rank=6)
        stage = pipeline.stages[0]
        each = StageOptimizer(stage, TrainConfig(optimizer=optimizer, ema=decay))
        seen = []
        for step in range(3):
            pipeline.step(random_ids(seed=step), step, 4 * step)
            each.step(1.0, 1.0)
            each.average()
            seen.append({name: value.detach().clone() for name, value in stage.trained().items()})
        weights.append(seen[-1])
    state = each.state_tensors()
    assert {name: tensor.shape for name, tensor in state.items()} == {
        f"{name}/{label}": form.shape for name, forms in each.state_forms().items() for label, form in forms.items()
    }
    for name, first in seen[0].items():
        expected = 0.75 * (0.75 * first + 0.25 * seen[1][name]) + 0.25 * seen[2][name]
        assert torch.allclose(state[f"{name}/ema"], expected, rtol=1e-12) and torch.equal(weights[0][name], weights[1][name]), name


def test_clipping():
    assert clip_scale(4.0, 1.0) == 0.25 and clip_scale(0.5, 1.0) == 1.0 and clip_scale(4.0, 0) == 1.0


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_no_number_is_refused(norm, clip):
    with pytest.raises(ValueError, match=f"the gradient norm is {norm}.*not applied"):
        clip_scale(norm, clip)
