"""Open one source: its tokenizer, its windows and what identifies them. Several become one run's data in `open.py`."""

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
from thinwire.data.batches import Batches, Samples, Windows
from thinwire.data.cache import TokenFile, cache_key, cached_tokenizer, cached_tokens, open_folder
from thinwire.data.chat import open_chat, template_facts
from thinwire.data.completions import Completions, row_texts
from thinwire.data.examples import Examples
from thinwire.data.hub import HubSource, open_hub
from thinwire.data.rows import LineSource, open_lines
from thinwire.data.shards import split_shards
from thinwire.data.source import FileSource, Split, find_files, open_stdlib, open_text
from thinwire.data.stream import TokenStream, inspect
from thinwire.data.streamed import Beginnings, Streamed
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


@dataclass(frozen=True)
class OpenedSource:
    """What one source gives."""

    train: Samples
    validation: Windows
    tokenizer: Tokenizer | None
    bytes_per_token: float | None
    fingerprint: str


@dataclass(frozen=True)
class Opening:
    """How to open a source."""

    data: DataConfig
    """Whose source is the one to open."""
    model: ModelConfig
    seed: int
    report: Report
    tokenizer: Tokenizer | None = None
    """The one of all sources of a mixture; None: as `data.tokenizer` says."""

    @property
    def folder(self) -> Path:
        return open_folder(self.data.cache)

    def teller(self) -> Callable[[], None]:
        """Return what tells people, once, that something has to be made."""
        told = {"tokenising": f"data.source {self.data.source!r}", "cache": str(self.folder)}
        return cache(lambda: self.report(told))

    def title(self, split: Split) -> str:
        return f"{SPLITS[split]} part of data.source {self.data.source!r}"


def open_part(opening: Opening) -> OpenedSource:
    """Open a source."""
    data, paths = opening.data, check_source(opening.data)
    if data.marked:
        return open_completions(opening, paths)
    if paths and paths[0].suffix == ".bin":
        return open_shards(opening, paths)
    return open_text_part(opening, open_plain(data, paths))


def open_plain(data: DataConfig, paths: Sequence[Path]) -> FileSource | HubSource:
    """Open text."""
    if data.source == "stdlib":
        return open_stdlib()
    return open_text(data.source, paths) if paths else open_hub(data.source, data.text_column)


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


def open_shards(opening: Opening, paths: list[Path]) -> OpenedSource:
    """Open token shards, with a tokenizer only where one is named."""
    data, model = opening.data, opening.model
    if data.buffer is not None:
        raise ValueError(
            f"data.buffer is {data.buffer}, but the shards {data.source!r} are mapped from the disk and need none: leave it out"
        )
    train, validation = (TokenStream(pieces, model.vocabulary) for pieces in split_shards(paths, data.max_tokens))
    tokenizer = opening.tokenizer
    if tokenizer is None and data.tokenizer != "train":
        tokenizer = load_tokenizer(data.tokenizer)
        check_fits(tokenizer, data.tokenizer, model.vocabulary)
    if tokenizer is not None:
        check_separator(tokenizer, model.separator)
    fingerprint = cache_key("shards", inspect(train), inspect(validation))
    windows = cut_windows(opening, train, "train"), cut_windows(opening, validation, "validation")
    size = None
    if tokenizer is not None:
        size = bytes_per_token(tokenizer, validation.read(0, min(len(validation), DECODED_TOKENS)))
    return OpenedSource(Batches(windows[0], opening.seed), windows[1], tokenizer, size, fingerprint)


def open_text_part(opening: Opening, source: FileSource | HubSource) -> OpenedSource:
    """Open text through the cache: tokenizer first, then the tokens of both splits; with `data.buffer` training text is not kept."""
    data, model, folder, tell = opening.data, opening.model, opening.folder, opening.teller()
    tokenizer = opening.tokenizer or text_tokenizer([source], data, model, folder, tell)
    check_separator(tokenizer, model.separator)
    dtype = "<u2" if vocabulary_size(tokenizer) <= 65536 else "<u4"
    text = tokenizer.to_str()

    def tokens(split: Split) -> tuple[np.ndarray, TokenFile]:
        # a tenth is plenty for validation, and streaming more of a Hub dataset would be a long download
        few = split == "validation" and (isinstance(source, HubSource) or data.buffer is not None)
        limit = max(1, data.max_tokens // 10) if few else data.max_tokens
        key = cache_key("tokens", source.digest, text, split, limit, dtype)

        def build() -> Iterator[tuple[np.ndarray, int]]:
            tell()
            return encode_pieces(tokenizer, source.pieces(split), limit)

        return cached_tokens(folder, key, dtype, build)

    stream = partial(TokenStream, vocabulary=model.vocabulary)
    validation_N, validation = tokens("validation")
    windows = partial(cut_windows, opening)
    size = validation.text_bytes / max(1, validation.tokens)
    if data.buffer is not None:
        streamed = open_streamed(opening, source, tokenizer, data.buffer)
        first = hashlib.sha256(streamed.sample(0).tobytes()).hexdigest()
        fingerprint = cache_key("streamed", source.digest, text, data.max_tokens, data.buffer, first, validation.sha256)
        return OpenedSource(streamed, windows(stream([(folder, validation_N)]), "validation"), tokenizer, size, fingerprint)
    train_N, train = tokens("train")
    fingerprint = hashlib.sha256(f"{train.dtype} {train.sha256} {validation.sha256}".encode()).hexdigest()
    both = windows(stream([(folder, train_N)]), "train"), windows(stream([(folder, validation_N)]), "validation")
    return OpenedSource(Batches(both[0], opening.seed), both[1], tokenizer, size, fingerprint)


def open_streamed(opening: Opening, source: FileSource | HubSource, tokenizer: Tokenizer, buffer: int) -> Streamed:
    """Open training text that is tokenised while it streams by."""
    data, context = opening.data, opening.model.context
    key = cache_key("places", source.digest, tokenizer.to_str(), data.max_tokens, buffer, context)
    streamed = Streamed(
        source, tokenizer, context, buffer, opening.seed, data.max_tokens, Beginnings(opening.folder / f"{key}.places.json")
    )
    if streamed.block(0) is None:
        raise ValueError(
            f"{opening.title('train')}: fewer than {context + 1} tokens found, but one sequence needs as many: give more text or lower "
            "--model.context"
        )
    return streamed


def open_completions(opening: Opening, paths: list[Path]) -> OpenedSource:
    """Open rows to learn answers from, through the cache."""
    data, model, folder, tell = opening.data, opening.model, opening.folder, opening.teller()
    if data.source == "stdlib" or data.buffer is not None:
        name = "data.source 'stdlib' has no rows" if data.buffer is None else f"data.buffer {data.buffer} is for text"
        raise ValueError(f"data.loss is completions, but {name}: give JSON lines, such as --data.source chats.jsonl, and no data.buffer")
    source: LineSource | HubSource = open_lines(data.source, paths) if paths else open_hub(data.source, data.text_column)

    def make() -> Tokenizer:
        texts = ((text, True) for _, row in source.rows("train") for text in row_texts(row))
        return train_tokenizer(texts, None, model.vocabulary)

    tokenizer = opening.tokenizer or named_tokenizer(source.digest, make, data, model, folder, tell)
    facts = (source.digest, tokenizer.to_str(), template_facts(data.tokenizer), model.separator, data.max_tokens)
    encoder = Completions(tokenizer, cache(lambda: open_chat(data.tokenizer, tokenizer)), model.separator)
    fill = next((each for each in (model.separator, end_token(tokenizer)) if each is not None), 0)

    def examples(split: Split) -> tuple[Examples, TokenFile]:
        def build() -> Iterator[tuple[np.ndarray, int]]:
            tell()
            return encoder.encode(source.rows(split), data.max_tokens)

        tokens_N, described = cached_tokens(folder, cache_key("completions", *facts, split), "<i4", build)
        title = opening.title(split)
        return Examples(tokens_N, model.context, title, fill=fill, packed=model.separator is not None), described

    (train, first), (validation, second) = examples("train"), examples("validation")
    opening.report(train.described())
    return OpenedSource(Batches(train, opening.seed), validation, tokenizer, None, cache_key("completions", first.sha256, second.sha256))


def cut_windows(opening: Opening, stream: TokenStream, split: Split) -> Windows:
    """Cut a split into windows, refusing one that holds no sequence."""
    return Windows(stream, opening.model.context, opening.title(split))


def text_tokenizer(
    sources: Sequence[FileSource | HubSource], data: DataConfig, model: ModelConfig, folder: Path, tell: Callable[[], None]
) -> Tokenizer:
    """Load the tokenizer that is named, or train one on all sources."""
    sizes = [source.train_bytes for source in sources]
    known = [size for size in sizes if size is not None]

    def make() -> Tokenizer:
        pieces = (piece for source in sources for piece in source.pieces("train"))
        return train_tokenizer(pieces, sum(known) if len(known) == len(sizes) else None, model.vocabulary)

    digest = sources[0].digest if len(sources) == 1 else cache_key(*(source.digest for source in sources))
    return named_tokenizer(digest, make, data, model, folder, tell)


def named_tokenizer(
    digest: str, make: Callable[[], Tokenizer], data: DataConfig, model: ModelConfig, folder: Path, tell: Callable[[], None]
) -> Tokenizer:
    """Load the tokenizer that is named, or make one for a source and keep it."""
    if data.tokenizer == "train":

        def build() -> Tokenizer:
            tell()
            return make()

        tokenizer = cached_tokenizer(folder, cache_key("tokenizer", digest, model.vocabulary), build)
    else:
        tokenizer = load_tokenizer(data.tokenizer)
    check_fits(tokenizer, data.tokenizer, model.vocabulary)
    return tokenizer
