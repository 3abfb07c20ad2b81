"""What the fields of a manifest must be: checked once, where a manifest is read, so that nobody behind it meets anything else."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

LARGEST = 2**63 - 1
MOST_STAGES = 2**16
SPLIT = re.compile(r"[1-9]\d*(,[1-9]\d*)*", re.ASCII)
HASH = re.compile(r"[0-9a-f]{64}")
Rule = tuple[Callable[[Any], bool], str]
"""A test of a value, and what it asks for."""


def is_flat(value: Any, levels: int = 4) -> bool:
    """Tell whether a value is nested no more deeply than so many levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is None or (levels > 0 and all(is_flat(each, levels - 1) for each in inner))


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST  # bool is an int too


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST  # which nan is not


def is_run_of_layers(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(is_count, value)) and all(b == a + 1 for a, b in pairwise(value))


def is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


COUNT: Rule = is_count, "a whole number from 0 on"
POSITIVE: Rule = lambda value: is_count(value) and value > 0, "a whole number from 1 on"
TEXT: Rule = is_text, "a text"
RULES: dict[str, Rule] = {
    "format": POSITIVE,
    "stage": COUNT,
    "stages": (lambda value: is_count(value) and 0 < value <= MOST_STAGES, f"a whole number from 1 to {MOST_STAGES}"),
    "layers": (is_run_of_layers, "a list of successive layers"),
    "data": TEXT,
    "step": COUNT,
    "seconds": (is_time, "a number from 0 on"),
    "basis_version": COUNT,
    "sha256": (lambda value: is_text(value) and HASH.fullmatch(value) is not None, "64 hexadecimal digits"),
}
"""Fields of every format."""
NEWER_RULES: dict[str, Rule] = {
    "split": (lambda value: is_text(value) and SPLIT.fullmatch(value) is not None, "layers per stage, such as 2,2"),
    "microbatches": POSITIVE,
    "before": TEXT,
    "bytes": COUNT,
}
"""Fields that format 1 did not have."""
OPTIONAL_RULES: dict[str, Rule] = {
    "stateless": (is_list_of_names, "a list of names"),
    "everyone": (lambda value: type(value) is int and -1 <= value <= LARGEST, "a whole number from -1 on"),
    "exchange": TEXT,
    "base": TEXT,
    "settings": TEXT,
    "config": TEXT,
}
"""Of the last two, hashes of the run's settings, each manifest has one: earlier releases wrote `config`."""


def check_fields(manifest: dict[str, Any], *, newer: bool) -> None:
    """Refuse a manifest with a field that is missing or is not what it should be."""
    rules = RULES | (NEWER_RULES if newer else {})
    for name, (fits, wanted) in (rules | NEWER_RULES | OPTIONAL_RULES).items():
        if name in manifest and not fits(manifest[name]):
            raise ValueError(f"its {name} is {shortened(manifest[name])}, not {wanted}")
        if name in rules and name not in manifest:
            raise ValueError(f"it has no {name}")
    if "settings" not in manifest and "config" not in manifest:
        raise ValueError("it has no settings")
    if manifest["stage"] >= manifest["stages"]:
        raise ValueError(f"it is of stage {manifest['stage']}, counted from 0, of {manifest['stages']} stages")


def shortened(value: Any) -> str:
    """Write a value in a few characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
