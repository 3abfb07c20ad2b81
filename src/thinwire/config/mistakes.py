"""What was probably meant by options of a command line that cannot be: one without its section, a pattern that the shell expanded."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path


def meant(option: str, known: Iterable[str]) -> str:
    """Suggest `--section.field` for an option that names only the field, or something near it; else the nearest of all."""
    names = sorted(known)
    fields = {name.rpartition(".")[2] for name in names if "." in name}
    field = option.rpartition(".")[2]
    near = difflib.get_close_matches(option, names, n=1)
    close = [field] if field in fields else [] if near else difflib.get_close_matches(field, sorted(fields), n=1)
    found = [name for name in names if "." in name and name.rpartition(".")[2] in close] or near
    if found:
        return f"did you mean {' or '.join(f'--{name}' for name in found)}?"
    return f"there are {', '.join(f'--{name}' for name in names)}"


def refuse_expanded(argv: Sequence[str], options: Collection[str], positional: int = 0) -> None:
    """Raise ValueError where one of some options, which take one value each, is followed by several: the shell has made them of one.

    `positional` values may stand behind an option without being its own.
    """
    for index, token in enumerate(argv):
        if not token.startswith("--") or token[2:].replace("-", "_") not in options:
            continue
        rest = argv[index + 1 :]
        values = rest[: next((place for place, other in enumerate(rest) if other.startswith("--")), len(rest))]
        if len(values) > 1 + positional:
            raise ValueError(
                f"{token} takes one value and is followed by {len(values)}: {first_values(values)}; {quoting_advice(token, values)}"
            )


def first_values(values: Sequence[str]) -> str:
    """Write the first values."""
    return ", ".join(values[:3]) + (", ..." if len(values) > 3 else "")


def quoting_advice(token: str, values: Sequence[str]) -> str:
    """Say how to give them as one: as the pattern that they were, or as one text."""
    if not all(os.path.exists(value) for value in values):
        return f"quote it if it is one text: {token} '{' '.join(values)}'"
    folders, endings = ({str(Path(value).parent) for value in values}, {Path(value).suffix for value in values})
    pattern = f"{os.path.commonpath(list(folders))}/*{endings.pop() if len(endings) == 1 else ''}"
    return f"the shell has expanded a pattern: quote it, such as {token} '{pattern.removeprefix('./')}'"
