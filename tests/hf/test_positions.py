"""Far along a sequence our logits leave those of transformers: by its rotary angles, which it multiplies in fp32, and by nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf.support import export, our_logits, some_ids, train_run
from thinwire.config.sections import ModelConfig
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.model.llama.rotary import rotary_tables

transformers = pytest.importorskip("transformers")
POSITIONS = 1500


class OurTables(nn.Module):
    """Stand in for the rotary embedding of transformers."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden_BTD, position_ids):
        return tuple(table[None].to(hidden_BTD.dtype) for table in rotary_tables(self.model, range(position_ids.shape[1])))


def test_with_our_angles_transformers_compute_our_logits_at_any_position(config, tmp_path):
    run = train_run(config, tmp_path / "run")
    out = export(run, tmp_path / "out")
    settings = (run / CONFIG_FILE).read_text()
    (run / CONFIG_FILE).write_text(settings.replace("context = 16", f"context = {POSITIONS}"))  # rotary positions have no table to outgrow
    ids_BT = some_ids(1, time=POSITIONS)
    ours = our_logits(run, ids_BT)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model.model.rotary_emb = OurTables(read_config(run / CONFIG_FILE).model)
    with torch.no_grad():
        theirs = model(ids_BT).logits
    assert (ours - theirs).abs().max() < 2e-6 * ours.abs().max()


def test_what_differs_are_angles_of_large_positions():
    """A product of position and frequency in fp32 is off by up to half a unit in its last place: 2e-4 at 6,000."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model = ModelConfig(width=256, heads=4)
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta}
    )
    positions = torch.arange(6000, 6100)
    theirs = torch.stack(LlamaRotaryEmbedding(config)(torch.zeros(1, 1), positions[None])).squeeze(1)
    ours = torch.stack(rotary_tables(model, range(6000, 6100))).float()
    half = torch.arange(32, dtype=torch.float64)
    angles = positions.double()[:, None] / torch.exp(half / 32 * torch.log(torch.tensor(model.rope_theta, dtype=torch.float64)))
    exact = torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2)
    assert (ours - exact).abs().max() < 1e-7
    assert 1e-5 < (theirs - exact).abs().max() < 5e-4
