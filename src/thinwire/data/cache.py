"""Keep trained tokenizers and token files in the cache folder, checked by sha256 and rebuilt when damaged.

A file's name is a hash of everything it was made from, so nothing here is ever out of date. Several processes may build the same entry
at once: each writes its own temporary file, and all of them write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy_format
from tokenizers import Tokenizer

from thinwire.util.files import atomic_file

FORMAT = "1"
"""Raised when the same inputs are to give other tokens."""


@dataclass(frozen=True)
class TokenFile:
    """Describe one split's token file."""

    tokens: int
    text_bytes: int
    dtype: str
    sha256: str


def open_folder(name: str) -> Path:
    """Make the cache folder if it is missing and return it."""
    folder = Path(os.path.expanduser(name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"data.cache {name!r} cannot be made ({error.strerror}): set --data.cache to a folder you may write to") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"data.cache {name!r} cannot be written to: set --data.cache to a folder you may write to")
    return folder


def cache_key(*facts: object) -> str:
    """Hash what an entry is made from."""
    return hashlib.sha256(json.dumps([FORMAT, *facts]).encode()).hexdigest()


def cached_tokenizer(folder: Path, key: str, build: Callable[[], Tokenizer]) -> Tokenizer:
    """Return the tokenizer kept under `key`, or build and keep it."""
    path = folder / f"{key}.tokenizer.json"
    entry = read_json(path)
    text = entry.get("tokenizer")
    if isinstance(text, str) and hashlib.sha256(text.encode()).hexdigest() == entry.get("sha256"):
        return Tokenizer.from_str(text)
    text = build().to_str()
    with atomic_file(path) as file:
        file.write(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokenizer": text}).encode())
    # the text decides, so that the first use and every later one go through the same parser
    return Tokenizer.from_str(text)


def cached_tokens(
    folder: Path, key: str, dtype: str, build: Callable[[], Iterable[tuple[np.ndarray, int]]]
) -> tuple[np.ndarray, TokenFile]:
    """Return the memory-mapped tokens kept under `key`, or build and keep them."""
    path, notes = folder / f"{key}.npy", folder / f"{key}.json"
    found = map_tokens(path, read_json(notes))
    if found is None:
        described = write_tokens(path, dtype, build())
        with atomic_file(notes) as file:
            file.write(json.dumps(asdict(described)).encode())
        found = map_tokens(path, asdict(described))
        if found is None:
            raise ValueError(f"{path} differs from what was just written to it: check the disk, or set --data.cache to another folder")
    return found


def write_tokens(path: Path, dtype: str, parts: Iterable[tuple[np.ndarray, int]]) -> TokenFile:
    """Write parts as one `.npy` file without holding them all in memory."""
    digest = hashlib.sha256()
    tokens = text_bytes = 0
    with atomic_file(path) as file:
        write_header(file, dtype, 0)
        start = file.tell()
        for ids_N, size in parts:
            block = ids_N.astype(dtype).tobytes()
            file.write(block)
            digest.update(block)
            tokens += len(ids_N)
            text_bytes += size
        file.seek(0)
        write_header(file, dtype, tokens)
        # numpy pads the header for a first dimension of up to 21 digits
        assert file.tell() == start
    return TokenFile(tokens, text_bytes, dtype, digest.hexdigest())


def write_header(file: BinaryIO, dtype: str, tokens: int) -> None:
    """Write the head of a `.npy` file."""
    npy_format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": (tokens,)})


def map_tokens(path: Path, entry: dict[str, object]) -> tuple[np.ndarray, TokenFile] | None:
    """Map a token file, or return None when it is missing or is not what its notes say."""
    try:
        described = TokenFile(**entry)  # type: ignore[arg-type]
        # an empty file cannot be mapped
        tokens_N = np.load(path, mmap_mode="r" if described.tokens else None, allow_pickle=False)
    except (OSError, ValueError, TypeError, EOFError):
        return None
    if tokens_N.shape != (described.tokens,) or tokens_N.dtype != np.dtype(described.dtype):
        return None
    if hashlib.sha256(memoryview(tokens_N)).hexdigest() != described.sha256:
        return None
    return tokens_N, described


def read_json(path: Path) -> dict[str, object]:
    """Return a JSON object, empty when the file is missing or damaged."""
    try:
        entry = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return entry if isinstance(entry, dict) else {}
