"""The board as text: a Markdown table for the file, two narrower ones for a terminal, and the page of all boards of a folder."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thinwire.board.score import Board, OnLink, Standing
from thinwire.util.files import write_atomic

MISSING = "-"
DISCUSSION = "discussion.md"
"""The text above all boards of a folder."""


@dataclass(frozen=True)
class TimeCheck:
    """Estimated and measured time to loss of one spec on one link."""

    label: str
    link: str
    estimated: float | None
    measured: float | None


@dataclass(frozen=True)
class Facts:
    """What stands above the table."""

    name: str
    config: str
    steps: int
    tokens: int
    seeds: tuple[int, ...]
    links: tuple[str, ...]
    own_target: bool
    """Whether the target was given, not taken from dense."""
    line: str
    versions: tuple[str, ...]
    """Of torch."""
    cores: tuple[int, ...]
    disturbed: float
    """Cores that other work kept busy before the worst speed measurement; 0 where it stayed below what matters."""
    setting: str = ""
    """What is common to all, beside the config."""
    notes: tuple[str, ...] = ()
    """What the figures do not show."""


def figure_text(value: float | None, form: str) -> str:
    """Write a number, or what stands for a missing one."""
    return MISSING if value is None else format(value, form)


def times(value: float | None) -> str:
    """Write a ratio."""
    return MISSING if value is None else f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def seconds_text(value: float) -> str:
    """Write a time with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def loss_text(standing: Standing, seeds: int) -> str:
    """Write the loss at equal tokens, its spread, and how many seeds it has if some are missing."""
    spread = "" if standing.spread is None else f" ± {standing.spread:.3f}"
    part = f" ({standing.seeds} of {seeds})" if 0 < standing.seeds < seeds else ""
    return figure_text(standing.loss, ".3f") + spread + part


def time_text(standing: Standing, link: OnLink) -> str:
    """Write the time to loss."""
    if standing.reached is None and standing.curve:
        return "not reached"
    if standing.reached is None or link.time is None:
        return MISSING
    return ("≤ " if standing.reached.at_most else "") + seconds_text(link.time)


def memory_text(standing: Standing) -> str:
    return MISSING if standing.peak_rss_bytes is None else f"{standing.peak_rss_bytes / 2**20:,.0f}"


def grouped(standings: Sequence[Standing]) -> list[tuple[str | None, list[Standing]]]:
    """Put standings under their headings, in the order given."""
    groups: list[tuple[str | None, list[Standing]]] = []
    for standing in standings:
        if not groups or groups[-1][0] != standing.heading:
            groups.append((standing.heading, []))
        groups[-1][1].append(standing)
    return groups


def line(cells: Sequence[str]) -> str:
    """Write one row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def markdown(board: Board, facts: Facts, checks: Sequence[TimeCheck]) -> str:
    """Write the board."""
    subject = board.subject
    rows = []
    for heading, standings in grouped(board.standings):
        cells = [[*subject.learning_cells(each, len(facts.seeds)).values()] for each in standings]
        for row, each in zip(cells, standings, strict=True):
            row += [text for link in facts.links for text in subject.link_cells(each, link).values()]
            row += [memory_text(each)] if facts.links else []
        rows += [[f"**{heading}**", *[""] * (len(cells[0]) - 1)]] if heading else []
        rows += cells
    first = [subject.long.get(name, name) for name in subject.learning_cells(board.standings[0], 1)]
    for link in facts.links:
        names = [subject.long.get(name, name) for name in subject.link_cells(board.standings[0], link)]
        first += [f"{link}: {names[0]}", *names[1:]]
    first += ["peak RSS of the largest stage, MB"] if facts.links else []
    rule = "|---" + "|---:" * (len(first) - 1) + "|"
    parts = [f"{'##' if subject.page else '#'} {facts.name}", *preamble(board, facts), "\n".join([line(first), rule, *map(line, rows)])]
    return "\n\n".join([*parts, *notes_text(facts), *check_table(checks, facts, subject.noun)]) + "\n"


def preamble(board: Board, facts: Facts) -> list[str]:
    """Write what the table is about."""
    text = f"{conditions(board, facts)} {board.subject.explanation}"
    return [text, f"    {facts.line}", *disturbance_text(facts)]


def conditions(board: Board, facts: Facts) -> str:
    """Write what the figures of any board were made with, and what time to loss is."""
    name = board.subject.reference
    given = "given" if facts.own_target else f"{name}'s after {facts.steps / 2:g} steps"
    target = f"not known yet: {name} has no learning row" if board.target is None else f"{board.target:.4f} ({given})"
    machine = [f"{'/'.join(map(str, facts.cores))} cores"] if facts.cores else []
    machine += [f"torch {'/'.join(facts.versions)}"] if facts.versions else []
    setting = f"{facts.setting}, " if facts.setting else ""
    return (
        f"Config `{facts.config}`, {setting}{facts.steps:,} steps = {facts.tokens:,} tokens, "
        f"seeds {', '.join(map(str, facts.seeds))}{'; ' * bool(machine)}{', '.join(machine)}. "
        f"Target: validation loss {target}. Time to loss = steps to the target, read off the learning curve, x seconds per step of workers "
        "over that emulated link."
    )


def disturbance_text(facts: Facts) -> list[str]:
    """Warn of times that mean little."""
    text = f"**Some times were measured beside other work ({facts.disturbed:.1f} cores busy): they are worth little.**"
    return [text] if facts.disturbed else []


def notes_text(facts: Facts) -> list[str]:
    """Write what the figures do not show."""
    return ["\n".join(f"* {note}" for note in facts.notes)] if facts.notes else []


def check_table(checks: Sequence[TimeCheck], facts: Facts, noun: str) -> list[str]:
    """Write how well the estimated times foretold the measured ones."""
    if not checks:
        return []
    rows = [line([noun, "link", "estimated, s", "measured, s", "measured / estimated"]), "|---|---|---:|---:|---:|"]
    for check in checks:
        pair = [MISSING if value is None else seconds_text(value) for value in (check.estimated, check.measured)]
        share = f"{check.measured / check.estimated:.2f}" if check.measured and check.estimated else MISSING
        rows.append(line([check.label, check.link, *pair, share]))
    return [f"Time to loss of the whole training over the link, seed {facts.seeds[0]}:", "\n".join(rows)]


def print_board(board: Board, facts: Facts, console: Console) -> None:
    """Print the board."""
    subject = board.subject
    learning = Table(title=f"{facts.name}: after {facts.tokens:,} tokens; {subject.bytes_title}")
    speed = Table(title="seconds to the target" if board.target is None else f"seconds to validation loss {board.target:.4f}")
    for index, name in enumerate(subject.learning_cells(board.standings[0], 1)):
        learning.add_column(name, justify="right" if index else "left", overflow="fold")
    speed.add_column(subject.noun, overflow="fold")
    for link in facts.links:
        for index, name in enumerate(subject.link_cells(board.standings[0], link)):
            speed.add_column(f"\n{name}" if index else f"{link}\n{name}", justify="right")
    speed.add_column("peak\nMB", justify="right")
    for heading, standings in grouped(board.standings):
        for table in (learning, speed) if heading else ():
            table.add_row(heading, style="bold")
        for each in standings:
            learning.add_row(*subject.learning_cells(each, len(facts.seeds)).values())
            speed.add_row(
                each.label, *[text for link in facts.links for text in subject.link_cells(each, link).values()], memory_text(each)
            )
    console.print(learning)
    if facts.links:
        console.print(speed)


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
