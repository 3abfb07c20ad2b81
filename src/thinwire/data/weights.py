"""The grammar of several sources with weights, `A:2,B:1`. Free of numpy: settings are checked without it."""

from __future__ import annotations

import os
from fractions import Fraction


def parse_mixture(source: str) -> list[tuple[str, Fraction]]:
    """Split `A:2,B:1` into sources and their weights; a source without weights is the only one."""
    parts = source.split(",")
    found = [part.rpartition(":") for part in parts]
    weights = [read_weight(weight) if name else None for name, _, weight in found]
    if len(parts) == 1 or all(weight is None for weight in weights) or os.path.exists(os.path.expanduser(source)):
        return [(source, Fraction(1))]
    for part, (name, _, _), weight in zip(parts, found, weights, strict=True):
        if weight is None or weight <= 0 or not name.strip():
            raise ValueError(
                f"data.source {source!r}: {part!r} of it has no weight above 0; write each source with one, such as 'a.txt:2,b/*.txt:1'"
            )
    return [(name.strip(), weight or Fraction(0)) for (name, _, _), weight in zip(found, weights, strict=True)]


def read_weight(text: str) -> Fraction | None:
    """Return a weight such as 2 or 0.5; None: it is none."""
    text = text.strip()
    return Fraction(text) if text.replace(".", "", 1).isdecimal() and text.isascii() else None
