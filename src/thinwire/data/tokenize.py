"""Train or load the tokenizer, and turn text into token ids.

Keeps nothing on disk: that is `cache.py`'s job. Training sees a fixed sample of the training text, so that the same text gives the same
tokenizer on every run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
# what well-known tokenizers call the end of a document
END_NAMES = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
SAMPLE_BYTES = 8 << 20
SMALLEST_VOCABULARY = 257
"""All bytes and the end token."""
GROUP_CHARACTERS = 1 << 21
Worded = TypeVar("Worded", bound=tuple[str, Any])
"""A text and what belongs to it."""
Numbered = tuple[str, tuple[int, bool]]
"""A piece of text, its number, and whether it ends its document."""


def train_tokenizer(pieces: Iterable[tuple[str, bool]], total_bytes: int | None, vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE of `vocabulary` entries, or fewer where the text has no more pairs to merge."""
    if vocabulary < SMALLEST_VOCABULARY:
        raise ValueError(
            f"model.vocabulary is {vocabulary}, but a byte-level tokenizer has at least {SMALLEST_VOCABULARY} entries: "
            f"raise --model.vocabulary to {SMALLEST_VOCABULARY} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_text(pieces, total_bytes), trainer)
    return tokenizer


def sample_text(pieces: Iterable[tuple[str, bool]], total_bytes: int | None) -> Iterator[str]:
    """Yield the start of each piece, in proportion, up to about 8 MB; with the total unknown, the first 8 MB."""
    share = 1.0 if total_bytes is None else min(1.0, SAMPLE_BYTES / max(1, total_bytes))
    taken = 0
    for text, _ in pieces:
        part = text[: math.ceil(len(text) * share)]
        taken += len(part)
        yield part
        if taken >= SAMPLE_BYTES:
            return


def load_tokenizer(name: str) -> Tokenizer:
    """Load a `tokenizer.json`, or the tokenizer of a Hub name or local folder behind `hf:`."""
    path = Path(os.path.expanduser(name.removeprefix("hf:")))
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file() and not name.startswith("hf:"):
        raise ValueError(f"data.tokenizer {name!r}: no file {path}: give 'train', the path of a tokenizer.json, or hf:NAME")
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name.removeprefix("hf:"))
    except Exception as error:  # tokenizers raises Exception itself, for a damaged file as for a name the Hub does not know
        advice = "write the file again" if path.is_file() else "check the name and the network, or give the path of a tokenizer.json"
        raise ValueError(f"data.tokenizer {name!r} cannot be loaded ({error}): {advice}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_fits(tokenizer: Tokenizer, name: str, vocabulary: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for."""
    entries = vocabulary_size(tokenizer)
    if entries > vocabulary:
        raise ValueError(
            f"data.tokenizer {name!r} has {entries} entries, but model.vocabulary is {vocabulary}: "
            f"set --model.vocabulary {entries} or choose a smaller tokenizer"
        )


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one: ids may have holes."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_token(tokenizer: Tokenizer) -> int | None:
    """Return the id placed between documents, or None for a tokenizer without one."""
    return next((number for name in END_NAMES if (number := tokenizer.token_to_id(name)) is not None), None)


def check_separator(tokenizer: Tokenizer, separator: int | None) -> None:
    """Refuse a token to keep documents apart by that is not the one behind each document."""
    end = end_token(tokenizer)
    if separator is not None and separator != end:
        advice = "leave it out" if end is None else f"set --model.separator {end}"
        ends = "no token" if end is None else f"token {end} ({tokenizer.id_to_token(end)})"
        raise ValueError(f"model.separator is {separator}, but this tokenizer's documents end with {ends}: {advice}")


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[tuple[str, bool]], limit: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield ids and the UTF-8 bytes they stand for, an end token after each document, `limit` ids in all."""
    for _, ids_N, text in _encode(tokenizer, ((text, (0, ends)) for text, ends in pieces), limit):
        yield ids_N, len(text.encode())


def encode_numbered(tokenizer: Tokenizer, pieces: Iterable[Numbered], limit: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of each piece and its ids, an end token after each document, `limit` ids in all."""
    for number, ids_N, _ in _encode(tokenizer, pieces, limit):
        yield number, ids_N


def _encode(tokenizer: Tokenizer, pieces: Iterable[Numbered], limit: int) -> Iterator[tuple[int, np.ndarray, str]]:
    """Yield number, ids and text of each piece."""
    end = end_token(tokenizer)
    for group in group_pieces(pieces):
        encodings = tokenizer.encode_batch_fast([text for text, _ in group], add_special_tokens=False)
        for (text, (number, ends_document)), encoding in zip(group, encodings, strict=True):
            ids = encoding.ids
            if len(ids) > limit:
                offsets = tokenizer.encode(text, add_special_tokens=False).offsets
                ids, text = ids[:limit], text[: offsets[limit - 1][1]]
            if ends_document and end is not None and len(ids) < limit:
                ids = [*ids, end]
            limit -= len(ids)
            yield number, np.array(ids, dtype=np.uint32), text
            if not limit:
                return


def group_pieces(pieces: Iterable[Worded]) -> Iterator[list[Worded]]:
    """Gather pieces to groups of about 2 million characters, enough to keep the tokenizer's threads busy."""
    group: list[Worded] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece[0])
        if characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def bytes_per_token(tokenizer: Tokenizer, ids_N: np.ndarray) -> float:
    """Measure the UTF-8 bytes of text that a token stands for, by decoding."""
    chunks = [ids_N[start : start + 65536].tolist() for start in range(0, len(ids_N), 65536)]
    return sum(len(text.encode()) for text in tokenizer.decode_batch(chunks)) / len(ids_N)
