"""Adapters in a stage: what is trained, how frozen matrices are held, and what it takes of memory."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY, random_ids
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.sections import AdapterConfig, PipelineConfig, RunConfig, TrainConfig
from thinwire.memory.account import always_there
from thinwire.model.adapter import hold, widen
from thinwire.model.cut import cut_layers
from thinwire.model.ends import Context
from thinwire.model.stage import Stage, build_stage

FORMS = ("full", "bf16", "int8")


def stage_with(adapter: AdapterConfig | None, index: int = 0, stages: int = 2) -> Stage:
    codec = make_codec(codec_defaults("dense", dtype="fp32"), TINY, seed=3)
    return build_stage(TINY, cut_layers(TINY.layers, stages), index, codec, 3, adapter)


@pytest.mark.parametrize("form", FORMS)
def test_only_the_adapter_has_gradients_and_at_first_it_adds_nothing(form):
    adapter = AdapterConfig(rank=2, targets="all-linear", base_format=form, dropout=0.3)
    plain, stage = stage_with(None, stages=1), stage_with(adapter, stages=1)
    ids_BT1, context = random_ids(), Context(0, torch.arange(4))
    (loss,), (wanted,) = stage(ids_BT1, (), context), plain(ids_BT1, (), context)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel={"full": 0, "bf16": 2e-2, "int8": 2e-2}[form])
    loss.backward()
    trained = stage.trained()
    assert len(trained) == 2 * 7 * TINY.layers and all(".lora_" in name for name in trained)
    assert all((parameter.grad is not None) == (name in trained) for name, parameter in stage.named_parameters())
    assert all(bool(each.grad.any()) for name, each in trained.items() if name.endswith("lora_B"))


@pytest.mark.parametrize("form", FORMS)
def test_a_held_matrix_multiplies_as_the_wide_one_does(form):
    """Forward and backward, where the frozen layer computes with what `hold` kept."""
    adapter = AdapterConfig(rank=2, targets="q_proj", base_format=form)
    stage = stage_with(adapter)
    linear = stage.layers["0"].ffn.up
    inputs = torch.randn(3, TINY.width, generator=torch.Generator().manual_seed(1), requires_grad=True)
    output = linear(inputs)
    output.square().sum().backward()
    wide = widen(linear.weight, linear.scale, torch.float32)
    assert torch.equal(output, inputs @ wide.T)
    assert torch.allclose(inputs.grad, 2 * output @ wide, rtol=1e-5, atol=1e-5)
    bytes_of = {"full": 4, "bf16": 2, "int8": 1}[form]
    assert linear.weight.element_size() == bytes_of and not linear.weight.requires_grad


def test_eight_bits_lose_at_most_half_a_step():
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    held, scale = hold(weight, "int8")
    assert scale is not None and held.dtype == torch.int8 and int(held.abs().max()) == 127
    assert bool(((widen(held, scale, torch.float32) - weight).abs() <= scale * 0.5001).all())


def test_memory_counts_the_base_without_gradients_or_moments():
    adapter = AdapterConfig(rank=2, base_format="bf16")
    config = RunConfig(
        model=TINY, adapter=adapter, codec=codec_defaults("dense"), train=TrainConfig(batch=4), pipeline=PipelineConfig(microbatches=2)
    )
    codec, stage = make_codec(config.codec, TINY), stage_with(adapter)
    found, all_trained = always_there(stage, codec, config), always_there(stage_with(None), codec, config)
    trained = sum(parameter.nbytes for parameter in stage.trained().values())
    assert found["parameters"] == found["gradients"] == trained and found["optimizer"] < 2.2 * trained
    assert found["frozen base"] == sum(each.nbytes for name, each in stage.named_parameters() if name in stage.frozen)
    assert 0.5 < found["frozen base"] / all_trained["parameters"] < 0.51 and "frozen base" not in all_trained
