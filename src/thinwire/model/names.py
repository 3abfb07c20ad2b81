"""Global names of a model's parameters: they do not depend on where it is cut, and what stands inside a block is its architecture's."""

from __future__ import annotations

import re

EMBEDDING, HEAD = "embedding.weight", "head.weight"
BLOCK = re.compile(r"layers\.(\d+)\.(.+)")
STATISTICS = "statistics"
"""The part of an end that holds statistics."""
BOUNDARY = re.compile(r"(?:entries|exits)\.(\d+)\.")


def block_name(layer: int, inner: str) -> str:
    """Return the global name of a parameter of a block."""
    return f"layers.{layer}.{inner}"


def split_block_name(name: str) -> tuple[int, str] | None:
    """Return the layer and the name inside its block; None for a parameter outside of blocks."""
    match = BLOCK.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def boundary_of(name: str) -> int | None:
    """Return the layer behind the boundary whose end has this parameter; None for a parameter of the network itself, or a statistic."""
    match = BOUNDARY.match(name)
    return int(match[1]) if match and not is_statistic(name) else None


def is_statistic(name: str) -> bool:
    """Tell whether a tensor only says what has crossed a boundary so far: at a new cut it begins anew."""
    return STATISTICS in name.split(".")
