"""Runs of a tiny model on a tiny text, as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path

from thinwire import cli

CONFIG = """
[model]
vocabulary = 300
width = 32
layers = 4
heads = 4
kv_heads = 2
ffn = 48
context = 16

[data]
source = {source}
cache = {cache}

[train]
steps = 6
batch = 4
rate = 0.003
warmup = 2
checkpoint_every = 2
validate_every = 4
validation_sequences = 8

[pipeline]
stages = 2
microbatches = 2
mode = "inprocess"

[codec]
name = "subspace"
rank = 6
"""


VARIETY: dict[str, tuple[str, ...]] = {
    "subspace": (),
    "dense": ("--codec.name", "dense"),
    "four bits": ("--codec.bits", "4"),
    "drift and dropout": ("--codec.drift_every", "2", "--codec.drift_rate", "0.5", "--model.dropout", "0.1"),
    "bf16": ("--train.dtype", "bf16"),
}
"""Words of trainings that must give the same bits again, resumed or in workers."""


def write_config(folder: Path, cache: Path) -> str:
    """Write text and config into a folder; return the config's path."""
    text = folder / "text.txt"
    text.write_text(
        "".join(f"{number} plus {number % 7} is {number + number % 7}, said the {number % 5} of them.\n" for number in range(600))
    )
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(source=json.dumps(str(text)), cache=json.dumps(str(cache))))
    return str(path)


def train(config: str, run: Path, *words: str) -> dict:
    """Run `thinwire train` to its end; return the summary."""
    assert cli.main(["train", "--config", config, "--run", str(run), "--train.threads", "1", *words]) == 0
    return json.loads((run / "summary.json").read_text())
