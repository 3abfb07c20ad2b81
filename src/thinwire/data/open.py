"""Open what a run trains on: the one door to this package.

Puts source, tokenizer, cache and batches together; each of them is a file of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.batches import Batches, Windows
from thinwire.data.cache import TokenFile, cache_key, cached_tokenizer, cached_tokens, open_folder
from thinwire.data.chat import open_chat, template_facts
from thinwire.data.completions import Completions, row_texts
from thinwire.data.examples import Examples
from thinwire.data.hub import HubSource, open_hub
from thinwire.data.rows import LineSource, open_lines
from thinwire.data.shards import split_shards
from thinwire.data.source import FileSource, Split, find_files, open_stdlib, open_text
from thinwire.data.stream import TokenStream, inspect
from thinwire.data.tokenize import (
    bytes_per_token,
    check_fits,
    check_separator,
    encode_pieces,
    end_token,
    load_tokenizer,
    train_tokenizer,
    vocabulary_size,
)

DECODED_TOKENS = 1 << 20
SPLITS: dict[Split, str] = {"train": "training", "validation": "validation"}
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Hold the batches of a run and what describes them."""

    train: Batches
    validation: Windows
    tokenizer: Tokenizer | None
    tokenizer_json: str | None
    bytes_per_token: float | None
    """UTF-8 bytes of validation text per token: bits per byte = loss / ln 2 / this."""
    fingerprint: str
    """sha256 that identifies both token streams."""


def open_data(data: DataConfig, model: ModelConfig, seed: int, report: Report = lambda event: None) -> Data:
    """Open `data.source` as batches of `model.context` tokens in the order of `seed`; `report` is told if it has to be tokenised."""
    if data.max_tokens < 1:
        raise ValueError(f"data.max_tokens is {data.max_tokens}: set --data.max_tokens to at least {model.context + 1}")
    if data.marked:
        return _open_completions(data, model, seed, report)
    if data.source == "stdlib":
        return _open_text(open_stdlib(), data, model, seed, report)
    if data.source.startswith("hf:"):
        return _open_text(open_hub(data.source, data.text_column), data, model, seed, report)
    paths = check_source(data)
    if paths[0].suffix == ".bin":
        return _open_shards(paths, data, model, seed)
    return _open_text(open_text(data.source, paths), data, model, seed, report)


def check_source(data: DataConfig) -> list[Path]:
    """Return the files that the source names, all of one kind, without reading them; none for a source that is no file."""
    if data.source.startswith("hf:"):
        open_hub(data.source, data.text_column)
    if data.source == "stdlib" or data.source.startswith("hf:"):
        return []
    paths = find_files(data.source)
    shards = [path for path in paths if path.suffix == ".bin"]
    if data.marked and shards:
        raise ValueError(f"data.loss is completions, but {shards[0]} holds tokens that do not say which are answers: give JSON lines")
    if shards and len(shards) < len(paths):
        other = next(path for path in paths if path.suffix != ".bin")
        raise ValueError(
            f"data.source {data.source!r} mixes shards ({shards[0]}) and text ({other}): narrow the glob to one kind, such as '*.bin'"
        )
    if not shards and not any(path.stat().st_size for path in paths):
        raise ValueError(f"data.source {data.source!r}: {paths[0]} is empty ({len(paths)} file(s), 0 bytes): give files with text in them")
    return paths


def _open_shards(paths: list[Path], data: DataConfig, model: ModelConfig, seed: int) -> Data:
    """Open token shards, with a tokenizer only where one is named."""
    train, validation = (TokenStream(pieces, model.vocabulary) for pieces in split_shards(paths, data.max_tokens))
    tokenizer = None if data.tokenizer == "train" else load_tokenizer(data.tokenizer)
    if tokenizer is not None:
        check_fits(tokenizer, data.tokenizer, model.vocabulary)
        check_separator(tokenizer, model.separator)
    fingerprint = cache_key("shards", inspect(train), inspect(validation))
    size = None
    if tokenizer is not None and len(validation):
        size = bytes_per_token(tokenizer, validation.read(0, min(len(validation), DECODED_TOKENS)))
    return _data(*_windows((train, validation), data, model), seed, tokenizer, size, fingerprint)


def _open_text(source: FileSource | HubSource, data: DataConfig, model: ModelConfig, seed: int, report: Report) -> Data:
    """Open text through the cache: tokenizer first, then the tokens of both splits."""
    folder = open_folder(data.cache)
    told = {"tokenising": f"data.source {data.source!r}", "cache": str(folder)}
    tell = cache(lambda: report(told))  # once, whichever has to be made

    def make() -> Tokenizer:
        return train_tokenizer(source.pieces("train"), source.train_bytes, model.vocabulary)

    tokenizer = _tokenizer(source.digest, make, data, model, folder, tell)
    check_separator(tokenizer, model.separator)
    dtype = "<u2" if vocabulary_size(tokenizer) <= 65536 else "<u4"
    text = tokenizer.to_str()

    def tokens(split: Split) -> tuple[np.ndarray, TokenFile]:
        # a tenth is plenty for validation, and streaming more of a Hub dataset would be a long download
        limit = max(1, data.max_tokens // 10) if split == "validation" and isinstance(source, HubSource) else data.max_tokens
        key = cache_key("tokens", source.digest, text, split, limit, dtype)

        def build() -> Iterator[tuple[np.ndarray, int]]:
            tell()
            return encode_pieces(tokenizer, source.pieces(split), limit)

        return cached_tokens(folder, key, dtype, build)

    (train_N, train), (validation_N, validation) = tokens("train"), tokens("validation")
    stream = partial(TokenStream, vocabulary=model.vocabulary)
    size = validation.text_bytes / max(1, validation.tokens)
    fingerprint = hashlib.sha256(f"{train.dtype} {train.sha256} {validation.sha256}".encode()).hexdigest()
    streams = [stream([(folder, tokens_N)]) for tokens_N in (train_N, validation_N)]
    return _data(*_windows(streams, data, model), seed, tokenizer, size, fingerprint)


def _open_completions(data: DataConfig, model: ModelConfig, seed: int, report: Report) -> Data:
    """Open rows to learn answers from, through the cache."""
    if data.source == "stdlib":
        raise ValueError(
            "data.loss is completions, but data.source 'stdlib' has no rows: give JSON lines, such as --data.source chats.jsonl"
        )
    paths = check_source(data)
    source: LineSource | HubSource = open_lines(data.source, paths) if paths else open_hub(data.source, data.text_column)
    folder = open_folder(data.cache)
    told = {"tokenising": f"data.source {data.source!r}", "cache": str(folder)}
    tell = cache(lambda: report(told))

    def make() -> Tokenizer:
        texts = ((text, True) for _, row in source.rows("train") for text in row_texts(row))
        return train_tokenizer(texts, None, model.vocabulary)

    tokenizer = _tokenizer(source.digest, make, data, model, folder, tell)
    facts = (source.digest, tokenizer.to_str(), template_facts(data.tokenizer), model.separator, data.max_tokens)
    encoder = Completions(tokenizer, cache(lambda: open_chat(data.tokenizer, tokenizer)), model.separator)
    fill = next((each for each in (model.separator, end_token(tokenizer)) if each is not None), 0)
    layouts, hashes = {}, []
    for split, title in SPLITS.items():

        def build(split: Split = split) -> Iterator[tuple[np.ndarray, int]]:
            tell()
            return encoder.encode(source.rows(split), data.max_tokens)

        tokens_N, described = cached_tokens(folder, cache_key("completions", *facts, split), "<i4", build)
        name = f"{title} part of data.source {data.source!r}"
        layouts[split] = Examples(tokens_N, model.context, name, fill=fill, packed=model.separator is not None)
        hashes.append(described.sha256)
    report(layouts["train"].described())
    return _data(layouts["train"], layouts["validation"], seed, tokenizer, None, cache_key("completions", *hashes))


def _tokenizer(
    digest: str, make: Callable[[], Tokenizer], data: DataConfig, model: ModelConfig, folder: Path, tell: Callable[[], None]
) -> Tokenizer:
    """Load the tokenizer that is named, or train one on the source."""
    if data.tokenizer == "train":
        key = cache_key("tokenizer", digest, model.vocabulary)

        def build() -> Tokenizer:
            tell()
            return make()

        tokenizer = cached_tokenizer(folder, key, build)
    else:
        tokenizer = load_tokenizer(data.tokenizer)
    check_fits(tokenizer, data.tokenizer, model.vocabulary)
    return tokenizer


def _data(
    train: Windows, validation: Windows, seed: int, tokenizer: Tokenizer | None, bytes_per_token: float | None, fingerprint: str
) -> Data:
    """Put the parts together."""
    return Data(
        train=Batches(train, seed),
        validation=validation,
        tokenizer=tokenizer,
        tokenizer_json=None if tokenizer is None else tokenizer.to_str(),
        bytes_per_token=bytes_per_token,
        fingerprint=fingerprint,
    )


def _windows(streams: Sequence[TokenStream], data: DataConfig, model: ModelConfig) -> tuple[Windows, Windows]:
    """Cut both splits into windows, refusing one that holds no sequence."""
    titles = [f"{title} part of data.source {data.source!r}" for title in SPLITS.values()]
    train, validation = (Windows(stream, model.context, title) for stream, title in zip(streams, titles, strict=True))
    return train, validation
