"""The board as text: one Markdown table for the file, two narrower ones for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from thinwire.compare.score import Board, OnLink, Standing

MISSING = "-"


@dataclass(frozen=True)
class Check:
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


def number(value: float | None, form: str, missing: str = MISSING) -> str:
    """Write a number, or what stands for a missing one."""
    return missing if value is None else format(value, form)


def times(value: float | None) -> str:
    """Write a ratio."""
    return MISSING if value is None else f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def seconds(value: float) -> str:
    """Write a time with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def loss_text(standing: Standing, seeds: int) -> str:
    """Write the loss at equal tokens, its spread, and how many seeds it has if some are missing."""
    spread = "" if standing.spread is None else f" ± {standing.spread:.3f}"
    part = f" ({standing.seeds} of {seeds})" if 0 < standing.seeds < seeds else ""
    return number(standing.loss, ".3f") + spread + part


def time_text(standing: Standing, link: OnLink) -> str:
    """Write the time to loss."""
    if standing.reached is None and standing.curve:
        return "not reached"
    if standing.reached is None or link.time is None:
        return MISSING
    return ("≤ " if standing.reached.at_most else "") + seconds(link.time)


def learning_cells(standing: Standing, seeds: int) -> dict[str, str]:
    """Write what concerns loss and bytes."""
    return {
        "codec": standing.label,
        "parameters": number(standing.parameters, ",d"),
        "loss": loss_text(standing, seeds),
        "to dense": MISSING if standing.distance is None else f"{standing.distance:+.2f} %",
        "forward": number(standing.forward, ",.1f"),
        "backward": number(standing.backward, ",.1f"),
        "bytes/token": number(standing.both, ",.1f"),
        "fewer": times(standing.fewer),
    }


def link_cells(standing: Standing, name: str) -> dict[str, str]:
    """Write what concerns one link."""
    link = standing.links[name]
    return {
        "tokens/s": number(link.tokens_per_second, ",.0f"),
        "s to loss": time_text(standing, link),
        "faster": times(link.faster),
    }


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


def markdown(board: Board, facts: Facts, checks: Sequence[Check]) -> str:
    """Write the board."""
    texts = {"parameters": "trainable parameters", "loss": "validation loss", "fewer": "fewer than dense", "bytes/token": "both"}
    texts |= {"forward": "bytes/token forward"}
    rows = []
    for heading, standings in grouped(board.standings):
        cells = [[*learning_cells(each, len(facts.seeds)).values()] for each in standings]
        for row, each in zip(cells, standings, strict=True):
            row += [text for link in facts.links for text in link_cells(each, link).values()]
            row += [memory_text(each)] if facts.links else []
        rows += [[f"**{heading}**", *[""] * (len(cells[0]) - 1)]] if heading else []
        rows += cells
    first = [texts.get(name, name) for name in learning_cells(board.standings[0], 1)]
    for link in facts.links:
        first += [f"{link}: tokens/s", "time to loss, s", "faster than dense"]
    first += ["peak RSS of the largest stage, MB"] if facts.links else []
    rule = "|---" + "|---:" * (len(first) - 1) + "|"
    parts = [f"## {facts.name}", *preamble(board, facts), "\n".join([line(first), rule, *map(line, rows)])]
    return "\n\n".join([*parts, *end_to_end(checks, facts)]) + "\n"


def preamble(board: Board, facts: Facts) -> list[str]:
    """Write what the table is about."""
    given = "given" if facts.own_target else f"dense's after {facts.steps / 2:g} steps"
    target = "not known yet: dense has no learning row" if board.target is None else f"{board.target:.4f} ({given})"
    machine = f"{'/'.join(map(str, facts.cores)) or 'unknown'} cores, torch {'/'.join(facts.versions) or 'unknown'}"
    lines = [
        f"Config `{facts.config}`, {facts.steps:,} steps = {facts.tokens:,} tokens, seeds {', '.join(map(str, facts.seeds))}; {machine}. "
        f"Target: validation loss {target}. Time to loss = steps to the target, read off the learning curve, x seconds per step of workers "
        "over that emulated link. Bytes are payload per token and boundary, ids included.",
        f"    {facts.line}",
    ]
    if facts.disturbed:
        lines.append(f"**Some times were measured beside other work ({facts.disturbed:.1f} cores busy): they are worth little.**")
    return lines


def end_to_end(checks: Sequence[Check], facts: Facts) -> list[str]:
    """Write how well the estimated times foretold the measured ones."""
    if not checks:
        return []
    rows = [line(["codec", "link", "estimated, s", "measured, s", "measured / estimated"]), "|---|---|---:|---:|---:|"]
    for check in checks:
        pair = [MISSING if value is None else seconds(value) for value in (check.estimated, check.measured)]
        share = f"{check.measured / check.estimated:.2f}" if check.measured and check.estimated else MISSING
        rows.append(line([check.label, check.link, *pair, share]))
    return [f"Time to loss of the whole training over the link, seed {facts.seeds[0]}:", "\n".join(rows)]


def show(board: Board, facts: Facts, console: Console) -> None:
    """Print the board."""
    learning = Table(title=f"{facts.name}: after {facts.tokens:,} tokens; bytes per token and boundary")
    speed = Table(title="seconds to the target" if board.target is None else f"seconds to validation loss {board.target:.4f}")
    for name in learning_cells(board.standings[0], 1):
        learning.add_column(name, justify="left" if name == "codec" else "right", overflow="fold")
    speed.add_column("codec", overflow="fold")
    for link in facts.links:
        for name in link_cells(board.standings[0], link):
            speed.add_column(f"{link}\n{name}" if name == "tokens/s" else f"\n{name}", justify="right")
    speed.add_column("peak\nMB", justify="right")
    for heading, standings in grouped(board.standings):
        for table in (learning, speed) if heading else ():
            table.add_row(heading, style="bold")
        for each in standings:
            learning.add_row(*learning_cells(each, len(facts.seeds)).values())
            speed.add_row(each.label, *[text for link in facts.links for text in link_cells(each, link).values()], memory_text(each))
    console.print(learning)
    if facts.links:
        console.print(speed)
