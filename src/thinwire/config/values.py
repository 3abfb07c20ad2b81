"""Values of settings in their types: what a TOML table holds into a dataclass, one value into TOML, and what was probably meant."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.util.shown import shown

TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false", type(None): "left out"}


def toml_value(value: str | int | float | bool) -> str:
    """Write one TOML value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the delete character, which JSON leaves bare.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, (int, float)), f"settings are texts, numbers and booleans, not {value!r}"
    return repr(value)


def as_table(value: Any, where: str, section: str) -> dict[str, Any]:
    """Return the value if it is a table, or refuse it."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {section} is {shown(repr(value))}; it must be a table, [{section}]")
    return value


def from_table(kind: Any, table: Any, where: str, section: str, title: str | None = None) -> Any:
    """Make a section's dataclass from its TOML table; messages call it by its title."""
    hints = get_type_hints(kind)
    for key in as_table(table, where, section):
        if key not in hints:
            raise ValueError(f"{where}: {title or f'[{section}]'} has no option {shown(repr(key))}; {near(key, hints)}")
    return kind(**{key: fit(hints[key], value, f"{where}: {section}.{key}") for key, value in table.items()})


def fit(hint: Any, value: Any, where: str) -> Any:
    """Return the value in the field's type, or refuse it."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where} is {shown(value, 50)}; whole numbers have 64 bits at most")
    for kind in kinds:
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if kind is float and type(value) in (int, float):
            return float(value)
        if type(value) is kind:
            return value
    allowed = [", ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else TYPE_NAMES.get(kind, str(kind)) for kind in kinds]
    raise ValueError(f"{where} is {shown(repr(value))}; it must be {' or '.join(allowed)}")


def near(name: str, known: Iterable[str], dashes: str = "") -> str:
    """Suggest the name that was probably meant, else list them all."""
    names = sorted(known)
    match = difflib.get_close_matches(name[:100], names, n=1)
    return f"did you mean {dashes}{match[0]}?" if match else f"there are {', '.join(dashes + other for other in names)}"
