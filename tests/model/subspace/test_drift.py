"""Test 4 of the method: moving the subspace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import TINY, make_pipeline, random_ids, relative
from oracle import fixed_table, wide_form
from thinwire.config.sections import ModelConfig, TrainConfig
from thinwire.model.subspace.drift import grassmann_step, propose
from thinwire.optim.optimizers import StageOptimizer


def moved(optimizer: str, dtype: str = "fp64", model: ModelConfig = TINY):
    """Train a little with the drift's measurement on, then propose a move."""
    pipeline = make_pipeline("subspace", model, stages=2, rank=6, dtype=dtype, drift_every=100)
    optimizers = [StageOptimizer(stage, TrainConfig(optimizer=optimizer)) for stage in pipeline.stages]
    for step in range(5):
        pipeline.step(random_ids(seed=step), step, 4 * step)
        for each in optimizers:
            each.step(1.0, 1.0)
    return pipeline, optimizers, propose(pipeline.stages[-1].stream, rate=0.3)


def apply(pipeline, optimizers, basis_DK):
    """Let all stages go over; return R."""
    for stage, optimizer in zip(pipeline.stages, optimizers, strict=True):
        rotation_KK = stage.stream.go_over(basis_DK, stage.stream.version + 1)
        optimizer.carry_over(rotation_KK)
    return rotation_KK


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_moved_basis_is_orthonormal_and_near_the_old_one(dtype):
    pipeline, _, move = moved("shared", dtype)
    basis, before = move.double(), pipeline.stages[0].stream.basis_DK.double()
    assert (basis.T @ basis - torch.eye(6)).abs().max() < 1e-6
    assert (basis.T @ before).diagonal().min() > 0.5
    assert relative(basis, before) > 1e-3


@pytest.mark.parametrize("model", [TINY, replace(TINY, output_bias=True, norm_reorder=True)], ids=["plain", "biases, norms behind"])
def test_loss_after_a_move_equals_the_projected_oracle(model):
    pipeline, optimizers, move = moved("shared", model=model)
    wide = wide_form(pipeline)
    along = move @ move.T
    fixed = fixed_table(pipeline)
    with torch.no_grad():
        for name, parameter in wide.stages[0].named_parameters():
            axis = next((stage.axes[name] for stage in pipeline.stages if name in stage.axes), None)
            if name == "embedding.weight":
                parameter.copy_(fixed + (parameter - fixed) @ along)
            elif axis == 0:
                parameter.copy_(along @ parameter)
    before = pipeline.evaluate(random_ids(seed=9))
    apply(pipeline, optimizers, move)
    after = pipeline.evaluate(random_ids(seed=9))
    assert after == pytest.approx(wide.evaluate(random_ids(seed=9)), rel=1e-10)
    assert abs(after - before) > 1e-6


@pytest.mark.parametrize("optimizer, label", [("shared", "shared_sq"), ("adamw", "exp_avg_sq"), ("muon", "momentum_buffer")])
def test_moments_follow_the_basis(optimizer, label):
    pipeline, optimizers, move = moved(optimizer)
    first = optimizers[0]
    before = {key: tensor.clone() for key, tensor in first.state_tensors().items()}
    name, weight = "layers.0.ffn.down.weight", first.named["layers.0.ffn.down.weight"].detach().clone()
    rotation = apply(pipeline, optimizers, move)
    after = first.state_tensors()
    assert torch.equal(first.named[name], rotation @ weight)
    carriers = {
        "shared_sq": torch.eye(after[f"{name}/{label}"].shape[0]).double(),
        "exp_avg_sq": rotation.square(),
        "momentum_buffer": rotation,
    }
    assert torch.allclose(after[f"{name}/{label}"], carriers[label] @ before[f"{name}/{label}"], rtol=1e-12, atol=1e-18)
    if optimizer != "muon":
        assert torch.allclose(after[f"{name}/exp_avg"], rotation @ before[f"{name}/exp_avg"], rtol=1e-12, atol=1e-18)
    row = "embedding.weight/exp_avg"
    assert torch.allclose(after[row], before[row] @ rotation.T, rtol=1e-12, atol=1e-18)


def test_payload_in_another_basis_is_an_error():
    pipeline, _, move = moved("shared")
    pipeline.stages[0].stream.go_over(move, 1)
    with pytest.raises(ValueError, match="basis version 1 where version 0 is in use"):
        pipeline.step(random_ids(), 6, 0)


def test_a_move_that_skips_a_version_is_an_error():
    pipeline, _, move = moved("shared")
    pipeline.stages[0].stream.go_over(move, 1)
    with pytest.raises(ValueError, match="version 1 cannot follow version 1"):
        pipeline.stages[0].stream.go_over(move, 1)


def test_a_step_catches_energy_that_the_subspace_missed():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(20, 200, dtype=torch.float64, generator=generator) * torch.linspace(2, 0.1, 20)[:, None]
    energy = vectors @ vectors.T
    basis = torch.linalg.qr(torch.randn(20, 4, dtype=torch.float64, generator=generator)).Q
    missed = [float(torch.trace(energy) - torch.trace(basis.T @ energy @ basis))]
    for _ in range(5):
        basis = grassmann_step(basis, energy, 0.3)
        missed.append(float(torch.trace(energy) - torch.trace(basis.T @ energy @ basis)))
    assert missed == sorted(missed, reverse=True) and missed[-1] < 0.9 * missed[0]


def test_no_energy_no_move():
    basis = torch.linalg.qr(torch.randn(8, 2, dtype=torch.float64)).Q
    assert torch.equal(grassmann_step(basis, torch.zeros(8, 8), 0.3), basis)


def test_how_a_new_basis_lies_in_memory_changes_no_bit():
    """One that was computed lies column by column, one that came over a link row by row; all stages must go over alike."""
    rotations = []
    for lay in (lambda basis: basis.T.contiguous().T, lambda basis: basis.contiguous()):
        pipeline, _, move = moved("shared")
        rotations += [stage.stream.go_over(lay(move), stage.stream.version + 1) for stage in pipeline.stages]
    assert all(torch.equal(rotation, rotations[0]) for rotation in rotations)
