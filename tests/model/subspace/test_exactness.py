"""Tests 1 and 2 of the method: the compressed pipeline is the single-process model, and the D-wide stream stays in the subspace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import TINY, gradients, make_pipeline, random_ids, relative
from oracle import fixed_table, wide_form
from thinwire.config.sections import TrainConfig
from thinwire.model.subspace.basis import distance_outside
from thinwire.optim.optimizers import StageOptimizer, clip_scale, rate_factor

INGREDIENTS = {
    "plain": {},
    "biases": {"output_bias": True, "attention_bias": "all", "ffn_bias": True},
    "norms behind": {"norm_reorder": True},
    "norms behind, biases": {"norm_reorder": True, "output_bias": True, "norm_eps": 0.1},
    "norms of heads, wide heads, window": {"qk_norm": "gains", "head_dim": 12, "window": 5},
    "speedrun": {"qk_norm": "plain", "ffn_kind": "relu2", "logit_cap": 15.0, "attention_bias": "all", "ffn_bias": True},
}
"""What a network may have and still stay in the subspace."""


@pytest.mark.parametrize("split", ["2,2", "1,2,1", "1,1,1,1", "3,1"])
@pytest.mark.parametrize("codec", ["subspace", "dense"])
def test_pipeline_equals_single_process_model(codec, split):
    free = int(split.split(",")[-1])
    model = replace(TINY, free_layers=free)
    options = {"rank": 6} if codec == "subspace" else {}
    single = make_pipeline(codec, model, stages=1, **options)
    cut = make_pipeline(codec, model, stages=len(split.split(",")), split=split, **options)
    batch = random_ids(batch=6)
    assert cut.step(batch, 0, 0) == pytest.approx(single.step(batch, 0, 0), rel=1e-10)
    whole, parts = gradients(single), gradients(cut)
    assert whole.keys() == parts.keys()
    for name in whole:
        assert relative(parts[name], whole[name]) < 1e-10, name


@pytest.mark.parametrize("ingredients", INGREDIENTS.values(), ids=INGREDIENTS)
def test_coordinate_form_equals_wide_form(ingredients):
    narrow = make_pipeline("subspace", replace(TINY, **ingredients), stages=2, rank=6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (each for stage in narrow.stages for each in stage.parameters()):
            if ingredients and parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    wide = wide_form(narrow)
    batch = random_ids()
    assert narrow.step(batch, 0, 0) == pytest.approx(wide.step(batch, 0, 0), rel=1e-12)
    basis, there = narrow.stages[0].stream.basis_DK, gradients(wide)
    for stage in narrow.stages:
        for name, parameter in stage.named_parameters():
            expected = there[name]
            if name in stage.axes:
                expected = basis.T @ expected if stage.axes[name] == 0 else expected @ basis
            assert relative(parameter.grad, expected) < 1e-10, name


def test_without_the_table_nothing_changes():
    cached, hashed = make_pipeline("subspace", rank=6), make_pipeline("subspace", rank=6, fixed_cache_mb=0)
    assert cached.stages[0].stream.fixed.table_VD is not None and hashed.stages[0].stream.fixed.table_VD is None
    batch = random_ids(batch=16)
    assert hashed.step(batch, 0, 0) == pytest.approx(cached.step(batch, 0, 0), rel=1e-12)
    for name, gradient in gradients(cached).items():
        assert relative(gradients(hashed)[name], gradient) < 1e-10, name


def test_free_layers_do_not_depend_on_the_cut():
    model = replace(TINY, free_layers=1)
    losses = [
        make_pipeline("subspace", model, stages=s, split=c, rank=6).step(random_ids(), 0, 0) for s, c in ((2, "2,2"), (4, None), (1, None))
    ]
    assert max(losses) - min(losses) < 1e-12


def test_a_boundary_between_free_layers_is_refused():
    model = replace(TINY, free_layers=3)
    with pytest.raises(ValueError, match=r"free_layers is 3 but the last stage has 2 layers.*pipeline.split"):
        make_pipeline("subspace", model, stages=2, rank=6)


def train_coordinates(steps: int, each):
    """Train in fp32 with the production optimizer, calling `each(pipeline)` now and then."""
    pipeline = make_pipeline("subspace", stages=4, rank=6, dtype="fp32")
    train = TrainConfig(steps=steps, warmup=5)
    optimizers = [StageOptimizer(stage, train) for stage in pipeline.stages]
    for step in range(steps):
        pipeline.step(random_ids(seed=step), step, step * 4)
        norm = sum(optimizer.squared_norm() for optimizer in optimizers) ** 0.5
        for optimizer in optimizers:
            optimizer.step(rate_factor(step, train), clip_scale(norm, train.clip))
        if step % 10 == 9:
            each(pipeline)


def distances_from_subspace(narrow, wide) -> list[float]:
    """Run the wide form and measure X_l - fixed[t] against S in front of every constrained boundary."""
    found, stage = [], wide.stages[0]
    ids = random_ids(seed=99)
    fixed = fixed_table(narrow)[ids[:, :-1]]
    basis = narrow.stages[0].stream.basis_DK

    def measure(module, arguments, output):
        if module.layer + 1 <= narrow.stages[0].constrained:
            found.append(distance_outside(output - fixed[: len(output)], basis))

    hooks = [block.register_forward_hook(measure) for block in stage.layers.values()]
    for start in range(0, len(ids), 2):
        fixed = fixed_table(narrow)[ids[start : start + 2, :-1]]
        wide.step(ids[start : start + 2], 0, start)
    for hook in hooks:
        hook.remove()
    return found


def test_wide_stream_stays_in_the_subspace_while_training():
    worst = []
    train_coordinates(100, lambda narrow: worst.extend(distances_from_subspace(narrow, wide_form(narrow, "fp32"))))
    assert len(worst) == 10 * 2 * 3
    assert max(worst) < 1e-5


@pytest.mark.parametrize("option", [{"branch_norm_gains": True}, {"output_bias": True}, {"output_dropout": 0.1}])
def test_the_check_notices_what_leaves_the_subspace(option):
    """The same measurement with a gain, a D-bias or dropout on the branch output must fail."""
    narrow = make_pipeline("subspace", stages=4, rank=6, dtype="fp32")
    wide = wide_form(narrow, "fp32", **option)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wide.stages[0].named_parameters():
            if "output_norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    assert max(distances_from_subspace(narrow, wide)) > 1e-2
