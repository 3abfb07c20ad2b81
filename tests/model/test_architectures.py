"""Laws of architectures: what each registered one declares of itself is true of the block that it builds."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from helpers import TINY, make_pipeline
from thinwire.config.registry import ARCHITECTURES
from thinwire.config.sections import ModelConfig
from thinwire.model.architecture import Architecture, find_architecture
from thinwire.model.block import Dropout, KVCache, Pass
from thinwire.model.llama.window import window_of
from thinwire.model.names import block_name, split_block_name
from thinwire.model.subspace.basis import random_basis

EVEN = replace(TINY, kv_heads=TINY.heads)
VARIANTS = {
    "grouped heads": TINY,
    "heads": EVEN,
    "biases": replace(EVEN, output_bias=True),
    "branch norms": replace(EVEN, branch_norm_gains=True),
    "tied": replace(EVEN, tied_head=True),
    "biases of queries, keys and values": replace(TINY, attention_bias="qkv"),
    "biases everywhere": replace(TINY, attention_bias="all", ffn_bias=True, head_dim=12),
    "wide heads": replace(EVEN, head_dim=12),
    "norms of heads": replace(TINY, qk_norm="gains", head_dim=10),
    "norms of heads with biases": replace(EVEN, qk_norm="gains", attention_bias="all"),
    "plain norms of heads": replace(EVEN, qk_norm="plain"),
    "norms behind": replace(EVEN, norm_reorder=True, output_bias=True),
    "squared ReLU": replace(EVEN, ffn_kind="relu2", output_bias=True, logit_cap=15.0),
    "window": replace(TINY, window=5),
    "window in some layers": replace(TINY, window=4, window_layers="1-2"),
    "window in some layers, norms of heads": replace(TINY, window=4, window_layers="0,2-3", qk_norm="gains"),
    "window in some layers, biases": replace(TINY, window=3, window_layers="1-3", attention_bias="qkv"),
    "linear": replace(TINY, rope_kind="linear", rope_factor=3.0),
    "dynamic": replace(TINY, rope_kind="dynamic", rope_factor=3.0, rope_context=TINY.context),
    "llama3": replace(TINY, rope_kind="llama3", rope_factor=8.0, rope_context=6, rope_fast=4.0),
    "yarn": replace(TINY, rope_kind="yarn", rope_factor=4.0, rope_context=6, rope_fast=3.0, rope_slow=0.5, rope_truncate=False),
}
LEARNT = {"dropout", "output_dropout", "free_layers"}
"""Settings that are no part of a network."""
BIASES = {"output_bias", "attention_bias", "ffn_bias"}
NOT_LINEAR = ("branch_norm_gains", "norm_reorder")
"""Norms behind a branch, which is then not linear in its units."""


def fitting() -> list:
    """List every architecture with the models that it accepts."""
    found = []
    for name in ARCHITECTURES.names():
        for label, model in VARIANTS.items():
            try:
                find_architecture(name).check(model)
            except ValueError:
                continue
            found.append(pytest.param(replace(model, architecture=name), id=f"{name}, {label}"))
    return found


def each_of(model: ModelConfig, start: int = 0, cache: KVCache | None = None, time: int = TINY.context) -> Pass:
    dropout = Dropout(0, 0, torch.zeros(1, dtype=torch.int64), False)
    return Pass(find_architecture(model.architecture).tables(model, range(start, start + time)), dropout, cache)


def random_block(model: ModelConfig, width: int | None = None, last_width: int | None = None) -> nn.Module:
    """Build a block in fp64 and draw all its numbers, so that no zero or one hides anything."""
    width = model.width if width is None else width
    block = find_architecture(model.architecture).block(model, 1, width, width if last_width is None else last_width).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * model.width**-0.5)
    return block


@pytest.mark.parametrize("model", fitting())
def test_the_linear_layers_are_those_of_the_block(model):
    block, names = random_block(model), find_architecture(model.architecture).linear_layers(model)
    linear = {name for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    assert linear.issuperset(names) and (not names or linear == set(names))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def added(block: nn.Module, model: ModelConfig) -> Tensor:
    """Return what a block adds to the stream when both branches read the same hidden state."""
    stream, hidden = normal(2, model.context, model.width), normal(2, model.context, model.width, seed=1)
    return block(stream, lambda _: hidden, each_of(model)) - stream


def architecture_of(model: ModelConfig) -> Architecture:
    return find_architecture(model.architecture)


def test_every_architecture_accepts_a_model():
    assert {case.values[0].architecture for case in fitting()} == set(ARCHITECTURES.names())


@pytest.mark.parametrize("model", fitting())
def test_all_that_a_block_adds_goes_through_its_writers(model):
    """With them at zero it adds nothing, no other parameter has a gradient, and each of them has one along its axis alone."""
    block, writers = random_block(model), architecture_of(model).writers(model)
    named = dict(block.named_parameters())
    assert writers.keys() <= named.keys() and all(named[name].shape[axis] == model.width for name, axis in writers.items())
    assert added(block, model).abs().min() > 0
    with torch.no_grad():
        for name in writers:
            named[name].zero_()
    written = added(block, model)
    assert not written.any()
    channel = 5
    (written[..., channel] * normal(*written.shape[:-1], seed=2)).sum().backward()
    for name, parameter in named.items():
        gradient = torch.zeros(1) if parameter.grad is None else parameter.grad
        assert bool(gradient.any()) == (name in writers), name
        if name in writers and not architecture_of(model).leaving(model):
            rest = gradient.clone()
            rest.select(writers[name], channel).zero_()
            assert not rest.any(), name


@pytest.mark.parametrize("model", fitting())
def test_coordinates_are_the_same_block_unless_a_setting_leaves_the_subspace(model):
    """A block on K coordinates with Z, read through fixed + U c, is the D-wide block with U Z (method, section 3)."""
    architecture, rank = architecture_of(model), 6
    basis_DK = random_basis(model.width, rank, 0)
    narrow, wide = random_block(model, rank), random_block(model)
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            axis, value = architecture.writers(model).get(name), narrow.get_parameter(name)
            inside = axis is not None or value.shape != parameter.shape
            parameter.copy_(value if not inside else value @ basis_DK.T if axis == 1 else basis_DK @ value)
    fixed_BTD, coordinates_BTK = normal(2, model.context, model.width), normal(2, model.context, rank, seed=1)
    expected = fixed_BTD + narrow(coordinates_BTK, lambda c: fixed_BTD + c @ basis_DK.T, each_of(model)) @ basis_DK.T
    found = wide(fixed_BTD + coordinates_BTK @ basis_DK.T, lambda hidden: hidden, each_of(model))
    outside = (found - expected).norm() / expected.norm()
    # With a bias the forms agree as long as it is U b; a D-wide one that was trained as such would not lie in the subspace.
    assert outside > 1e-3 if "branch_norm_gains" in architecture.leaving(model) else outside < 1e-12


@pytest.mark.parametrize("model", fitting())
def test_the_last_branch_writes_as_many_channels_as_it_is_told(model):
    stream = normal(2, model.context, model.width)
    assert random_block(model, last_width=7)(stream, lambda hidden: hidden, each_of(model)).shape[-1] == 7


@pytest.mark.parametrize("model", fitting())
def test_a_sequence_read_token_by_token_is_the_same(model):
    block, stream, cache = random_block(model), normal(1, model.context, model.width), KVCache()
    whole = block(stream, lambda hidden: hidden, each_of(model))
    for place in range(model.context):
        token = block(stream[:, place : place + 1], lambda hidden: hidden, each_of(model, place, cache, 1))
        cache.read(torch.zeros(1, 1, dtype=torch.int64))
        torch.testing.assert_close(token, whole[:, place : place + 1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("model", fitting())
def test_what_the_stage_does_not_draw_is_not_random(model):
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        modules = architecture_of(model).block(model, 0, model.width, model.width), architecture_of(model).norm(model)
        states.append([each for module in modules for name, each in module.named_parameters() if each.dim() != 2 and "bias" not in name])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


@pytest.mark.parametrize("model", fitting())
def test_the_count_is_that_of_the_built_model(model):
    for layers in (2, 5):
        stages = make_pipeline("dense", replace(model, layers=layers, window_layers=None)).stages
        assert architecture_of(model).count(model, layers) == sum(p.numel() for stage in stages for p in stage.parameters())


@pytest.mark.parametrize("model", fitting())
def test_the_cost_of_one_token_is_what_is_multiplied(model):
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        random_block(model)(normal(1, 1, model.width), lambda hidden: hidden, each_of(model, time=1))
    architecture = architecture_of(model)
    heads = model.heads * model.head_size
    attended = 2 * heads  # by the query and for the value; the counter does not know every kernel of attention
    assert counter.get_total_flops() / 2 in (architecture.cost(model, 1), architecture.cost(model, 1) - attended)
    windows = [window_of(model, layer) or 101 for layer in range(model.layers)]
    seen = mean(min(place, window) for place in range(1, 102) for window in windows)
    assert architecture.cost(model, 101) - architecture.cost(model, 1) == round(2 * (seen - 1) * heads)


def only(block: nn.Module, kept: dict[str, tuple[int, int, int]], parts: set[str]) -> nn.Module:
    """Set all units to zero but the indices (axis, start, length) of `kept`."""
    with torch.no_grad():
        for name in parts:
            parameter = block.get_parameter(name)
            value = parameter.clone()
            parameter.zero_()
            if name in kept:
                parameter.narrow(*kept[name]).copy_(value.narrow(*kept[name]))
    return block


@pytest.mark.parametrize("model", fitting())
def test_units_work_side_by_side(model):
    """What each adds on its own adds up to the whole, and what is at zero has no gradient."""
    kinds = architecture_of(model).units(model)
    parts = {name for units in kinds for name in units.axes}
    assert len(parts) == sum(len(units.axes) for units in kinds)
    if not kinds:
        return
    none = added(only(random_block(model), {}, parts), model).detach()
    total = torch.zeros_like(none)
    for units in kinds:
        sizes = {name: random_block(model).get_parameter(name).shape[axis] for name, axis in units.axes.items()}
        assert all(size % units.count == 0 for size in sizes.values())
        for unit in range(units.count):
            kept = {name: (axis, unit * sizes[name] // units.count, sizes[name] // units.count) for name, axis in units.axes.items()}
            block = only(random_block(model), kept, parts)
            alone = added(block, model) - none
            assert alone.any()
            total += alone.detach()
            (alone * normal(*alone.shape, seed=3)).sum().backward()
            for name in parts:
                rest = block.get_parameter(name).grad.clone()
                if name in kept:
                    rest.narrow(*kept[name]).zero_()
                assert not rest.any(), name
    if not any(getattr(model, name) for name in NOT_LINEAR):
        torch.testing.assert_close(total + none, added(random_block(model), model), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("model", fitting())
def test_every_parameter_has_one_name_in_its_hugging_face_form(model):
    form = architecture_of(model).huggingface
    if form is None or form.why_not(model) is not None:
        return
    entries = form.tensors(model)
    assert len({entry.theirs for entry in entries}) == len(entries)
    built = {name: tuple(p.shape) for stage in make_pipeline("dense", model).stages for name, p in stage.named_parameters()}
    assert {entry.ours: entry.shape for entry in entries if entry.ours} == built
    assert all(split_block_name(block_name(*found)) == found for name in built if (found := split_block_name(name)))
    table = json.loads(
        json.dumps({"model_type": form.model_type, "architectures": [form.class_name], **form.to_json(model, model.context)})
    )
    again = form.from_json(table, Path("config.json"))
    # With biases on some matrices alone all that the plain network has come back: those we did not have are zero.
    zero = any(entry.ours is None for entry in entries)
    same = {entry.name for entry in fields(ModelConfig)} - LEARNT - {"architecture"} - (BIASES if zero else set())
    assert {name: getattr(again, name) for name in same} == {name: getattr(model, name) for name in same}
    assert form.to_json(again, model.context) == form.to_json(model, model.context)
