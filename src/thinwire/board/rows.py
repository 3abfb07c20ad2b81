"""Row files: one JSON file per finished measurement. A row that was made with other settings is refused, never mixed in."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.config.earlier import modern_settings
from thinwire.config.sections import DataConfig, RunConfig
from thinwire.config.toml import CONFIG_FILE, flatten, read_config
from thinwire.util.files import write_atomic

Row = dict[str, Any]
FORMAT = 1
"""Raised when a change of the code makes earlier rows worthless: another initialisation, another rule of a codec."""
NAME_LENGTH = 24
"""Most letters of a corpus' own name; what follows tells two of the same name apart."""


def read_row(path: Path, config: RunConfig, ignored: frozenset[str] = frozenset()) -> Row | None:
    """Read a row and refuse one of other settings; None where there is none."""
    if not path.exists():
        return None
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        settings, made = modern_settings(row["settings"]), row["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a row of a comparison ({error}); delete it to make it again") from None
    if made != FORMAT:
        raise ValueError(f"{path} is of format {made}, this version makes {FORMAT}; remove that file to make it again")
    refuse_row_of_others(path, settings, config, "give --out another folder, or remove that file to make it again", ignored)
    return row


def row_settings(config: RunConfig) -> Row:
    """List the settings that a row stands for: all but the place of the cache."""
    return {name: value for name, value in flatten(config).items() if name != "data.cache"}


def refuse_row_of_others(
    where: Path, made_with: Mapping[str, Any], config: RunConfig, remedy: str, ignored: frozenset[str] = frozenset()
) -> None:
    """Raise ValueError for the first setting that differs from those of a finished row or run."""
    wanted = row_settings(config)
    codec, exchange = (type(chosen)(name=chosen.name) for chosen in (config.codec, config.exchange))
    defaults = flatten(RunConfig(codec=codec, exchange=exchange))
    for name in wanted | dict(made_with):
        # A setting that came with a later version and stands at its default is what that row had.
        there = made_with[name] if name in made_with else defaults.get(name)
        if name not in ignored and there != wanted.get(name):
            raise ValueError(f"{where} was made with {name} = {there}, this comparison has {wanted.get(name)}; {remedy}")


def write_row(path: Path, config: RunConfig, row: Row) -> Row:
    """Put a row and the settings it was made with in place; return it as it will be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT} | row | {"settings": row_settings(config)}, indent=1)
    write_atomic(path, (text + "\n").encode())
    return json.loads(text)


def data_settings(settings: Mapping[str, Any]) -> Row:
    """Return those settings that say what is trained on, and not who reads it; one that came with a later version has its default."""
    known = {f"data.{name}": value for name, value in asdict(DataConfig()).items()} | dict(settings)
    return {name: value for name, value in known.items() if name.startswith("data.") and name not in ("data.cache", "data.everywhere")}


def corpus_name(config: RunConfig) -> str:
    """Name a corpus so that a file can bear it: the last part of its source, and six digits of all its settings."""
    own = re.sub(r"[^\w.-]+", "_", Path(config.data.source).stem).strip("_")[:NAME_LENGTH]
    settings = data_settings(row_settings(config))
    digits = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
    return f"{own}-{digits}" if own else digits


def trained_on(row: Path, run: Path) -> Row | None:
    """Return what a row, or else its run, was trained on; None where there is neither, or nothing that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return data_settings(json.loads(row.read_text(encoding="utf-8"))["settings"])
    with suppress(OSError, ValueError):
        return data_settings(row_settings(read_config(run / CONFIG_FILE)))
    return None


def read_lines(path: Path) -> list[Row]:
    """Read a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_of_workers(folder: Path, config: RunConfig) -> Path:
    """Return the metrics file of the worker of the first stage, in replica 0."""
    return folder / "metrics" / f"stage-{0 if config.pipeline.stages > 1 else 'all'}.jsonl"


def curve_of(row: Row) -> dict[int, float]:
    """Return a row's validation losses by step, in order."""
    return {int(step): loss for step, loss in sorted(row["curve"].items(), key=lambda item: int(item[0]))}
