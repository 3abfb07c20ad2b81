"""Rows of JSON lines to learn answers from, split into training and validation. What is in a row is `completions.py`'s affair."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.data.source import Split, hash_text, in_validation

Row = tuple[str, Any]
"""Where a row stands, and what it holds."""


@dataclass(frozen=True)
class LineSource:
    """Hold the files, how many rows they have, and a sha256 over their bytes."""

    name: str
    paths: tuple[Path, ...]
    digest: str
    count: int

    def rows(self, split: Split) -> Iterator[Row]:
        """Yield the rows of a split."""
        hashed = sum(in_validation(str(number)) for number in range(self.count)) / max(1, self.count)
        by_hash = 0.02 <= hashed <= 0.3  # with few rows a hash can leave a side empty
        last = self.count - max(1, self.count // 10)
        for number, (where, line) in enumerate(self._lines()):
            if (in_validation(str(number)) if by_hash else number >= last) == (split == "validation"):
                yield where, parse_line(where, line)

    def _lines(self) -> Iterator[tuple[str, str]]:
        for path in self.paths:
            with open(path, encoding="utf-8") as file:
                yield from ((f"{path} line {number}", line) for number, line in enumerate(file, start=1) if not line.isspace())


def parse_line(where: str, line: str) -> Any:
    """Read one row."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} is no JSON ({error}): write one object per line, or leave --data.loss at all to read plain text"
        ) from None


def open_lines(name: str, paths: Sequence[Path]) -> LineSource:
    """Hash the files and count their rows."""
    digest, count = hashlib.sha256(), 0
    for path in paths:
        try:
            size, content = hash_text(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it, such as with 'iconv -t utf-8'") from error
        digest.update(f"{size}\0{content}\n".encode())
        with open(path, encoding="utf-8") as file:
            count += sum(not line.isspace() for line in file)
    if count < 2:
        raise ValueError(f"data.source {name!r} has {count} row(s): give at least 2, one to train on and one to validate with")
    return LineSource(name, tuple(paths), digest.hexdigest(), count)
