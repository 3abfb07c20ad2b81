"""Tokenise a text or dataset once for many runs: `thinwire data 'books/*.txt' shards`, then `--data.source 'shards/*.bin'`.

The folder has shards of both splits and the tokenizer. It appears whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.config.mistakes import first_values, quoting_advice
from thinwire.config.sections import DataConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class DataCommand:
    """Write a source as token shards."""

    source: Annotated[str, tyro.conf.Positional]
    """`stdlib`, a text file or glob in quotes, or hf:NAME[:CONFIG]."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder to make."""
    tokenizer: str = "train"
    """`train` (byte-level BPE on the source), a `tokenizer.json`, or hf:NAME."""
    vocabulary: int = ModelConfig.vocabulary
    """Most entries of the tokenizer: the model.vocabulary of the runs."""
    text_column: str = DataConfig.text_column
    """Column of a Hugging Face dataset that holds the text."""
    max_tokens: int = DataConfig.max_tokens
    """Most tokens of each split; of a dataset's validation a tenth."""
    shard_tokens: int = 50_000_000
    """Tokens of a shard; as many are in memory."""
    cache: str = DataConfig.cache
    """Folder for trained tokenizers."""


def main(argv: list[str]) -> None:
    """Run the `data` verb."""
    values = argv[: next((place for place, word in enumerate(argv) if word.startswith("--")), len(argv))]
    if len(values) > 2:
        raise ValueError(
            f"thinwire data takes a source and a folder, and was given {len(values)} words: {first_values(values)}; "
            f"{quoting_advice('thinwire data', values[:-1])}"
        )
    command = tyro.cli(DataCommand, prog="thinwire data", args=argv)
    from thinwire.data.writing import TOKENIZER, write_source  # not at the top: --help answers without it
    from thinwire.hf.folders import new_folder

    data = DataConfig(
        source=command.source,
        tokenizer=command.tokenizer,
        text_column=command.text_column,
        max_tokens=command.max_tokens,
        cache=command.cache,
    )
    with new_folder(command.out, "the folder") as made:
        counts = write_source(data, command.vocabulary, made, command.shard_tokens)
        shards = len(list(made.glob("*.bin")))
    print(f"{command.out}: {counts['train']:,} training and {counts['validation']:,} validation tokens in {shards} shards")
    print(f"train on them with --data.source '{command.out}/*.bin' --data.tokenizer {command.out / TOKENIZER}")
