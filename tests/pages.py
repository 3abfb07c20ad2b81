"""What README and docs say, taken apart: commands, blocks of Python, in their order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = {"", "sh", "shell", "bash", "console"}
"""Languages of fenced blocks whose every line is a command."""
PROGRAMS = ("thinwire", "make", ".venv/bin/python", "python", "python3", "pip", "git", "cd", "tensorboard", "trackio")
"""First words that make a command of a line in an indented block, or of `code` in a sentence or a table."""
ELSEWHERE = re.compile(r"^(alice|bob|carol)\$ +")
"""Prompts of lines that need a machine each; tests/cluster/test_join.py runs such a pair."""


@dataclass(frozen=True)
class Item:
    """A command or a block of Python of a page."""

    text: str
    kind: str = "shell"


def items_of(page: Path) -> list[Item]:
    """List commands and Python blocks in the page's order."""
    found: list[Item] = []
    for part in re.split(r"(^```.*?^```\s*$)", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        if part.startswith("```"):
            head, _, body = part.partition("\n")
            body = body.rstrip().removesuffix("```")
            if head[3:].strip() == "python":
                found.append(Item(body, "python"))
            elif head[3:].strip() in SHELL:
                lines = body.replace("\\\n", " ").splitlines()
                found += [Item(line) for line in map(clean, lines) if line]
        else:
            found += prose_items(part)
    return found


def prose_items(text: str) -> list[Item]:
    """List the commands of indented lines and of `code`."""
    found = []
    for paragraph in re.split(r"\n(?=\n|    |\|)", text):
        line = clean(paragraph.strip("\n")) if paragraph.startswith("    ") and "\n" not in paragraph.strip("\n") else ""
        if line:
            found += [Item(line)] if is_command(line) else []
            continue
        codes = re.findall(r"`([^`]+)`", " ".join(paragraph.split()))
        found += [Item(code) for code in codes if is_command(code) and " " in code]
    return found


def clean(line: str) -> str:
    """Take the comment off a line."""
    return re.sub(r"(^|\s+)# .*$", "", line).strip()


def is_command(text: str) -> bool:
    return text.split()[0] in PROGRAMS or bool(ELSEWHERE.match(text))
