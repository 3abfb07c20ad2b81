"""Stream the documents of a Hugging Face dataset (`hf:NAME[:CONFIG]`, a Hub name or a local folder).

Needs the extra `hf`, and imports it only to read; a dataset whose tokens are cached opens without it being loaded. Not here: tokens.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.data.rows import Row
from thinwire.data.source import Split, in_validation
from thinwire.util.files import files_below


@dataclass(frozen=True)
class HubSource:
    """Name a dataset, its column, and what its cache key is made of."""

    name: str
    path: str
    config: str | None
    column: str
    digest: str
    train_bytes: int | None = None

    def pieces(self, split: Split) -> Iterator[tuple[str, bool]]:
        """Yield the texts of a split, each a whole document."""
        return ((text, True) for text, _ in self.numbered(split, 0))

    def numbered(self, split: Split, first: int) -> Iterator[tuple[str, tuple[int, bool]]]:
        """Yield the texts of a split from row `first` on, with the numbers of their rows."""
        for number, row in self._rows(split, first):
            text = self._text(row)
            if text:
                yield text, (number, True)

    def rows(self, split: Split) -> Iterator[Row]:
        """Yield the rows of a split, and where they stand."""
        return ((f"{self.name} row {number + 1}", row) for number, row in self._rows(split))

    def _rows(self, split: Split, first: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a split with their numbers, from number `first` on."""
        splits = self._load()
        if "train" not in splits:
            raise ValueError(f"data.source {self.name!r} has the splits {sorted(splits)}, but no 'train': use a dataset that has one")
        own = next((name for name in ("validation", "test") if name in splits), None)
        documents = splits["train"] if split == "train" or own is None else splits[own]
        for number, row in enumerate(documents.skip(first) if first else documents, start=first):
            if own is not None or in_validation(str(number)) == (split == "validation"):
                yield number, row

    def _text(self, row: dict[str, Any]) -> str:
        """Return the text of a row, empty where the column holds nothing."""
        if self.column not in row:
            raise ValueError(f"data.source {self.name!r} has no column {self.column!r}: set --data.text_column to one of {sorted(row)}")
        text = row[self.column]
        if text is not None and not isinstance(text, str):
            raise ValueError(
                f"column {self.column!r} of {self.name!r} holds {type(text).__name__}, not text: "
                f"set --data.text_column to one of {sorted(row)}"
            )
        return text or ""

    def _load(self) -> Any:
        """Open all splits of the dataset for streaming."""
        import datasets

        try:
            return datasets.load_dataset(self.path, name=self.config, streaming=True)
        except Exception as error:  # datasets raises a dozen unrelated types here, from DNS failures to unknown configs
            raise ValueError(
                f"data.source {self.name!r} cannot be opened ({type(error).__name__}: {error}): check the name, the config and the network"
            ) from error


def open_hub(source: str, column: str) -> HubSource:
    """Read `hf:NAME[:CONFIG]` and make the dataset's cache key, without touching the network."""
    try:
        version = importlib.metadata.version("datasets")
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"data.source {source!r} needs the package datasets; in the checkout: pip install -c constraints.txt -e '.[hf]'"
        ) from error
    path, config = parse_name(source)
    facts = [path, config, column, version, local_files(path)]
    return HubSource(source, path, config, column, hashlib.sha256(json.dumps(facts).encode()).hexdigest())


def parse_name(source: str) -> tuple[str, str | None]:
    """Split `hf:NAME[:CONFIG]`, leaving the colons of paths alone."""
    name = source.removeprefix("hf:")
    expanded = os.path.expanduser(name)
    if os.path.exists(expanded):
        return expanded, None
    path, colon, config = name.rpartition(":")
    if colon and path and config and "/" not in config and "\\" not in config:
        return os.path.expanduser(path), config
    if not name or name.endswith(":") or name.startswith(":"):
        raise ValueError(f"data.source {source!r} names no dataset: write hf:NAME or hf:NAME:CONFIG, such as hf:roneneldan/TinyStories")
    return expanded, None


def local_files(path: str) -> list[tuple[str, int, int]]:
    """List name, size and time of a local dataset's files, so that a change gives a new cache key; empty for a Hub name."""
    root = Path(path)
    return [(file.relative_to(root).as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in files_below(root)]
