"""The page of all boards: OUT.md, put together from OUT/discussion.md, every OUT/NAME.md and their plots."""

from __future__ import annotations

import math
import re
from pathlib import Path

from thinwire.util.files import write_atomic

DISCUSSION = "discussion.md"


def order(path: Path) -> tuple[float, str]:
    """Sort boards by the number in front of their name, then by name."""
    match = re.match(r"\d+", path.stem)
    return (int(match[0]) if match else math.inf, path.stem)


def is_board(path: Path) -> bool:
    """Tell a board from other pages in the same folder: it begins with its own name."""
    return path.name != DISCUSSION and path.read_text(encoding="utf-8").startswith(f"## {path.stem}\n")


def plots_of(out: Path, name: str) -> Path:
    """Return the folder of a board's plots."""
    return out / "plots" / name


def pictures(out: Path, name: str, before: str = "") -> list[str]:
    """Write a board's plots as Markdown; `before` leads from the page to the folder of boards."""
    images = sorted(plots_of(out, name).glob("*.png"))
    return [f"![{name}: {image.stem}]({before}{image.relative_to(out).as_posix()})" for image in images]


def write_page(out: Path) -> Path:
    """Rebuild the page; return its path."""
    parts = [f"# {out.name.replace('_', ' ').capitalize()}"]
    if (out / DISCUSSION).exists():
        parts.append((out / DISCUSSION).read_text(encoding="utf-8").strip())
    for path in sorted(filter(is_board, out.glob("*.md")), key=order):
        parts.append(path.read_text(encoding="utf-8").strip())
        parts += pictures(out, path.stem, f"{out.name}/")
    page = out.with_name(out.name + ".md")
    write_atomic(page, ("\n\n".join(parts) + "\n").encode())
    return page
