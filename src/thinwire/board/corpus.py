"""Another corpus in the same folder: its rows, runs and board stand beside those that are there, under names that say which it is."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.board.cases import Case
from thinwire.board.command import CompareCommand
from thinwire.board.rows import settings_of
from thinwire.config.sections import RunConfig
from thinwire.config.toml import CONFIG_FILE, read_config

NAME_LENGTH = 24
"""Most letters of a corpus' own name; what follows tells two of the same name apart."""


def data_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings that say what is trained on."""
    return {word: value for word, value in settings.items() if word.startswith("data.")}


def corpus_name(config: RunConfig) -> str:
    """Name a corpus so that a file can bear it: the last part of its source, and six digits of all its settings."""
    settings = data_settings(settings_of(config))
    own = re.sub(r"[^\w.-]+", "_", Path(config.data.source).stem).strip("_")[:NAME_LENGTH]
    digits = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
    return f"{own}-{digits}" if own else digits


def places(command: CompareCommand, case: Case) -> Iterator[tuple[Path, Path]]:
    """Yield where the rows of a case and the runs they are made from would be."""
    for seed in command.seeds or (case.config.seed,):
        name = case.name(seed)
        yield command.out / "learn" / f"{name}.json", case.runs / name
        for link in command.links:
            yield command.out / "end_to_end" / f"{name}-{link}.json", case.runs / f"{name}-{link}"
    for link in command.links:
        name = f"{case.stem}-{link}"
        yield command.out / "speed" / f"{name}.json", case.runs / name


def made_with(row: Path, run: Path) -> dict[str, Any] | None:
    """Return what a row, or else its run, was trained on; None where there is neither, or nothing that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return data_settings(json.loads(row.read_text(encoding="utf-8"))["settings"])
    with suppress(OSError, ValueError):
        return data_settings(settings_of(read_config(run / CONFIG_FILE)))
    return None


def beside(command: CompareCommand, cases: list[Case]) -> tuple[CompareCommand, list[Case]]:
    """Rename board and cases if the folder holds rows of another corpus under their names, or already some of this one under others."""
    wanted, name = data_settings(settings_of(cases[0].config)), corpus_name(cases[0].config)
    renamed = [replace(case, corpus=name) for case in cases]
    known = any(made_with(*place) == wanted for case in renamed for place in places(command, case))
    others = (made_with(*place) for case in cases for place in places(command, case))
    if not known and all(found is None or found == wanted for found in others):
        return command, cases
    print(f"{command.out} holds rows of another corpus: those of this one, and its board, have {name} in their names", flush=True)
    return replace(command, name=f"{command.name}-{name}"), renamed
