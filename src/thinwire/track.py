"""Trackers: where the numbers of each step go. A metrics file for programs; progress for people is in `progress.py`, curves in `trackers/`.

No aggregation and no timing of the step itself: a tracker shows the values it is handed.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Tracker:
    """Take the values of a step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the values of a finished step, counted from 1."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is still held back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class JsonLines(Tracker):
    """Append one JSON object per line; after a resume, drop what lies beyond the resumed step."""

    def __init__(self, path: Path, resumed: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed is not None and path.exists():
            drop_after(path, resumed)
        self.file = path.open("a", encoding="utf-8")
        self.failed = False

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        try:
            self.file.write(json.dumps(plain({"step": step, **values}), allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:  # a full disk: the training is worth more than its figures
            if not self.failed:
                print(f"thinwire: warning: {self.file.name} cannot be written ({error.strerror}); training goes on", file=sys.stderr)
            self.failed = True

    def close(self) -> None:
        self.file.close()


def plain(value: Any) -> Any:
    """Turn a value into strict JSON: array scalars become numbers, what is not finite becomes null."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    number = float(value)
    return number if math.isfinite(number) else None


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Keep what can be drawn as a curve: the finite numbers."""
    return {name: value for name, value in plain(values).items() if type(value) in (int, float)}


def drop_after(path: Path, step: int) -> None:
    """Keep the whole lines up to a step, in one atomic replacement."""
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if step_of(line) <= step]
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def step_of(line: str) -> float:
    """Read a line's step; a line torn by a crash lies beyond every step."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf
