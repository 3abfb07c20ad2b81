"""Trackers: where the numbers of each step go. A metrics file for programs; progress for people is in `progress.py`, curves in `trackers/`.

No aggregation and no timing of the step itself: a tracker shows the values it is handed.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from thinwire.util.disk import shortage
from thinwire.util.files import write_atomic
from thinwire.util.notices import warn


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
        self.path, self.resumed = path, resumed
        self.file: FileIO | None = None
        self.failed = False
        self._write(b"")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._write(json.dumps(plain({"step": step, **values}), allow_nan=False).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        """Append a whole line or nothing; on a full disk say so once and try again with the next: the training is worth more."""
        try:
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self.resumed is not None and self.path.exists():
                    drop_after(self.path, self.resumed)
                self.file, self.resumed = self.path.open("ab", buffering=0), None
            end = self.file.seek(0, os.SEEK_END)
            if self.file.write(line) != len(line):
                self.file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self.failed:
                warn(f"{self.path} was not written: {shortage(self.path, error)}. Training goes on, its figures are missing until then")
            self.failed = True
        else:
            self.failed = self.failed and not line

    def close(self) -> None:
        if self.file is not None:
            with suppress(OSError):
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
    """Keep the whole lines up to a step: by cutting the file off, which needs no room, or else in one atomic replacement."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if step_of_line(line) <= step]
    if kept == lines[: len(kept)]:
        with path.open("rb+") as file:
            file.truncate(sum(len(line.encode()) + 1 for line in kept))
        return
    write_atomic(path, "".join(line + "\n" for line in kept).encode())


def step_of_line(line: str) -> float:
    """Read a line's step; a line torn by a crash lies beyond every step."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def last_loss(metrics: Path, step: int) -> float | None:
    """Return the loss that the metrics file tells of a step that was done before this process was started."""
    try:
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()[-1:]]
    except (OSError, ValueError):
        return None
    found: list[Any] = [line.get("loss") for line in lines if isinstance(line, dict) and line.get("step") == step]
    return found[0] if found and type(found[0]) is float else None
