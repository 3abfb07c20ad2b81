"""How the logits of an exported run in transformers differ from ours along a long sequence, and why.

    .venv/bin/python bench/positions.py RUN [--tokens 6144]

RUN is a run folder whose network is a plain Llama; it is exported, and both read the same random ids in fp32. Angles: transformers
multiplies position and frequency in fp32, we do in fp64 and round cosine and sine. The third column gives our tables to transformers; the
last two compare each side with the same network in fp64. All are the largest difference up to a position, as a share of the largest logit.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from thinwire import checkpoint
from thinwire.cli import main as cli
from thinwire.config.sections import ModelConfig, RunConfig
from thinwire.model.ends import Context
from thinwire.model.llama.rotary import rotary_tables
from thinwire.model.stage import Stage
from thinwire.pipeline.by_stage import leave_ends_out
from thinwire.pipeline.inprocess import Pipeline, build_pipeline
from thinwire.run.saved import read_settings

MARKS = (16, 128, 1024, 4096, 6000, 16384, 65536)


class OurTables(nn.Module):
    """Stand in for the rotary embedding of transformers."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden_BTD: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cosine_TS, sine_TS = rotary_tables(self.model, range(position_ids.shape[1]))
        return cosine_TS[None].to(hidden_BTD.dtype), sine_TS[None].to(hidden_BTD.dtype)


def our_pipeline(config: RunConfig, run: Path) -> Pipeline:
    """Build a run's network in fp32 and load its newest checkpoint."""
    pipeline = build_pipeline(replace(config, train=replace(config.train, dtype="fp32")), torch.device("cpu"))
    checkpoint.load_stages(checkpoint.newest(run, len(pipeline.stages)), pipeline.stages, None, {})
    return pipeline


def our_logits(stages: list[Stage], compute: torch.dtype, ids_BT: Tensor) -> Tensor:
    """Run the stages one behind another, without boundaries."""
    seen: list[Tensor] = []
    stages[-1].head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].double()))
    payload: tuple[Tensor, ...] = ()
    for stage in stages:
        leave_ends_out(stage, compute)
        payload = stage(torch.cat((ids_BT, ids_BT[:, :1]), dim=1), payload, Context(0, torch.arange(1), False))
    return seen[0]


def exact_logits(config: RunConfig, source: Pipeline, ids_BT: Tensor) -> Tensor:
    """Run the same weights in fp64."""
    double = build_pipeline(replace(config, train=replace(config.train, dtype="fp64")), torch.device("cpu"))
    for stage, other in zip(double.stages, source.stages, strict=True):
        stage.load_state_dict(other.state_dict())
    return our_logits(double.stages, torch.float64, ids_BT)


@torch.no_grad()
def measure(run: Path, tokens: int) -> dict[str, Tensor]:
    """Return the differences by column, of every position."""
    settings = read_settings(run)
    config = replace(settings, model=replace(settings.model, context=tokens))
    ids_BT = torch.randint(0, config.model.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    pipeline = our_pipeline(config, run)
    exact = exact_logits(config, pipeline, ids_BT)
    ours = our_logits(pipeline.stages, torch.float32, ids_BT)
    with tempfile.TemporaryDirectory(prefix="thinwire-positions-") as folder:
        assert cli.main(["export", str(run), f"{folder}/llama", "--sequences", "0"]) == 0
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/llama", dtype=torch.float32).eval()
    theirs = model(ids_BT).logits[0].double()
    model.model.rotary_emb = OurTables(config.model)
    with_our_tables = model(ids_BT).logits[0].double()
    pairs = {
        "transformers to ours": (theirs, ours),
        "with our tables": (with_our_tables, ours),
        "ours to fp64": (ours, exact),
        "transformers to fp64": (theirs, exact),
    }
    return {name: (one - other).abs().amax(-1) / exact.abs().max() for name, (one, other) in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, default=6144)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.run, arguments.tokens)
    table = Table(title="largest difference of logits up to a position, share of the largest logit, fp32")
    for column in ("position", *found):
        table.add_column(column, justify="right")
    for mark in MARKS:
        if mark <= arguments.tokens:
            table.add_row(f"{mark:,}", *(f"{float(values[:mark].max()):.1e}" for values in found.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
