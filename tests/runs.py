"""Runs of a tiny model on a tiny text, as a user starts them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from thinwire.checkpoint import Saver
from thinwire.cli import main as cli

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
    "entropy": ("--codec.entropy", "true", "--codec.rate", "1.5", "--codec.backward_rate", "2.5"),
    "entropy, ids known": ("--codec.entropy", "true", "--codec.bits", "3", "--data.everywhere", "true"),
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


@contextmanager
def unhurried() -> Iterator[None]:
    """Let every snapshot of this process reach the disk: steps this small overtake a slow one, and one that waits gives way to a newer."""
    save = Saver.save

    def saved(self: Saver, *given: Any, **words: Any) -> None:
        save(self, *given, **words)
        with suppress(ValueError):  # a disk that is full is told otherwise
            self.flush()

    with mock.patch.object(Saver, "save", saved):
        yield


def train(config: str, run: Path, *words: str) -> dict:
    """Run `thinwire train` to its end; return the summary."""
    with unhurried():
        assert cli.main(["train", "--config", config, "--run", str(run), "--train.threads", "1", *words]) == 0
    return json.loads((run / "summary.json").read_text())
