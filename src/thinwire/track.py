"""Trackers: where the numbers of each step go. A metrics file for programs, a progress line for people; curves are in `trackers/`.

No aggregation and no timing of the step itself: a tracker shows the values it is handed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from thinwire.disk import shortage, warn

PAUSE_SECONDS = 2.0  # between plain lines: frequent enough to see life, rare enough for a log file


FORMS = {
    "loss": "loss {:.4f}",
    "val_loss": "validation {:.4f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "bytes_per_token": "{:,.1f} bytes/token",
}


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
    kept = [line for line in lines if step_of(line) <= step]
    if kept == lines[: len(kept)]:
        with path.open("rb+") as file:
            file.truncate(sum(len(line.encode()) + 1 for line in kept))
        return
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


class Progress(Tracker):
    """Show `loss`, `val_loss`, `tokens_per_second` and `bytes_per_token`: a live bar on a terminal, now and then a plain line elsewhere."""

    def __init__(self, steps: int, start: int = 0, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps, self.done, self.stream, self.clock = steps, start, stream or sys.stdout, clock
        self.shown: dict[str, Any] = {}
        self.first: tuple[int, float] | None = None
        self.printed_at = -math.inf
        self.pending = False
        self.bar: Bar | None = None
        if self.stream.isatty():
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
            self.bar = Bar(*columns, console=Console(file=self.stream), refresh_per_second=4)
            self.task = self.bar.add_task("starting", total=steps, completed=start)
            self.bar.start()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        now = self.clock()
        self.first = self.first or (step, now)
        self.done = max(self.done, step)
        self.shown |= values
        text = self.describe(now)
        if self.bar:
            self.bar.update(self.task, completed=self.done, description=text)
            return
        self.pending = True
        if now - self.printed_at >= PAUSE_SECONDS or "val_loss" in values or step >= self.steps:
            self.print_line(text, now)

    def print_line(self, text: str, now: float) -> None:
        print(text, file=self.stream, flush=True)
        self.printed_at, self.pending = now, False

    def describe(self, now: float) -> str:
        """Write the newest values in one line."""
        parts = [f"step {self.done}/{self.steps}"]
        for key, form in FORMS.items():
            if self.shown.get(key) is not None:
                parts.append(form.format(float(self.shown[key])))
        assert self.first is not None
        first_step, first_time = self.first
        if first_step < self.done < self.steps:
            parts.append(f"ETA {duration((self.steps - self.done) * (now - first_time) / (self.done - first_step))}")
        return "  ".join(parts)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
        elif self.pending:
            self.print_line(self.describe(self.clock()), self.clock())


def duration(seconds: float) -> str:
    """Write a time as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
