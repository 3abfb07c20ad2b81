"""Write a text or dataset as token shards (`shards.py`), with the tokenizer beside them. Memory holds one shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.cache import open_folder
from thinwire.data.parts import check_source, open_plain, text_tokenizer
from thinwire.data.shards import write_shard
from thinwire.data.source import Split
from thinwire.data.tokenize import encode_pieces
from thinwire.data.weights import parse_mixture

NAMES: dict[Split, str] = {"train": "train", "validation": "val"}
"""Files with `val` in their names are validation, as in the nanoGPT speedruns."""
TOKENIZER = "tokenizer.json"


def write_source(data: DataConfig, vocabulary: int, out: Path, shard_tokens: int) -> dict[Split, int]:
    """Tokenise a source into shards in the folder `out`; return the tokens of each split."""
    if shard_tokens < 1 or data.max_tokens < 1:
        raise ValueError(f"shards of {shard_tokens} tokens, {data.max_tokens} in all: choose 1 or more for --shard-tokens and --max-tokens")
    if len(parse_mixture(data.source)) > 1:
        raise ValueError(f"{data.source!r} are several sources: write each into a folder of its own, and weigh these when you train")
    paths = check_source(data)
    if paths and paths[0].suffix == ".bin":
        raise ValueError(f"{paths[0]} is a token shard already: name text files, or hf:NAME")
    source = open_plain(data, paths)
    tokenizer = text_tokenizer([source], data, ModelConfig(vocabulary=vocabulary), open_folder(data.cache), lambda: None)
    (out / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
    counts: dict[Split, int] = {}
    for split, name in NAMES.items():
        limit = max(1, data.max_tokens // 10) if split == "validation" and not paths and data.source != "stdlib" else data.max_tokens
        ids = (ids_N for ids_N, _ in encode_pieces(tokenizer, source.pieces(split), limit))
        counts[split] = 0
        for number, tokens_N in enumerate(full_shards(ids, shard_tokens)):
            write_shard(out / f"{name}-{number:05}.bin", tokens_N)
            counts[split] += len(tokens_N)
    if not all(counts.values()):
        raise ValueError(f"{data.source!r} gives {counts['train']} training and {counts['validation']} validation tokens: give more text")
    return counts


def full_shards(parts: Iterator[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Put ids together to rows of `size`, and what is left to a last one."""
    held: list[np.ndarray] = []
    have = 0
    for ids_N in parts:
        held.append(ids_N)
        have += len(ids_N)
        while have >= size:
            whole_N = np.concatenate(held)
            yield whole_N[:size]
            held, have = [whole_N[size:]], have - size
    if have:
        yield np.concatenate(held)
