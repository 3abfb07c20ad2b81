"""The board as text: one Markdown table for the file, two narrower ones for a terminal. How a board of codecs is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from thinwire.board.score import Board, OnLink, Standing

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
    setting: str = ""
    """What is common to all, beside the config."""
    notes: tuple[str, ...] = ()
    """What the figures do not show."""


@dataclass(frozen=True)
class Style:
    """How the boards of a subject are written; `learning` and `link` make the cells of a spec by the names of their columns."""

    heading: str
    """What stands before the board's name."""
    learning: Callable[[Standing, int], dict[str, str]]
    link: Callable[[Standing, str], dict[str, str]]
    long: Mapping[str, str]
    """What a column is called in the file, where there is more room."""
    bytes: str
    """What is counted, in few words."""
    preamble: Callable[[Board, Facts], list[str]]


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
        "forward": number(standing.sent.get("forward"), ",.1f"),
        "backward": number(standing.sent.get("backward"), ",.1f"),
        "bytes/token": number(standing.judged, ",.1f"),
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


def markdown(board: Board, facts: Facts, checks: Sequence[Check], style: Style) -> str:
    """Write the board."""
    rows = []
    for heading, standings in grouped(board.standings):
        cells = [[*style.learning(each, len(facts.seeds)).values()] for each in standings]
        for row, each in zip(cells, standings, strict=True):
            row += [text for link in facts.links for text in style.link(each, link).values()]
            row += [memory_text(each)] if facts.links else []
        rows += [[f"**{heading}**", *[""] * (len(cells[0]) - 1)]] if heading else []
        rows += cells
    first = [style.long.get(name, name) for name in style.learning(board.standings[0], 1)]
    for link in facts.links:
        names = [style.long.get(name, name) for name in style.link(board.standings[0], link)]
        first += [f"{link}: {names[0]}", *names[1:]]
    first += ["peak RSS of the largest stage, MB"] if facts.links else []
    rule = "|---" + "|---:" * (len(first) - 1) + "|"
    parts = [f"{style.heading} {facts.name}", *style.preamble(board, facts), "\n".join([line(first), rule, *map(line, rows)])]
    return "\n\n".join([*parts, *notes_text(facts), *end_to_end(checks, facts, board.subject.noun)]) + "\n"


def preamble(board: Board, facts: Facts) -> list[str]:
    """Write what the table is about."""
    text = f"{conditions(board, facts)} Bytes are payload per token and boundary, ids included."
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


def end_to_end(checks: Sequence[Check], facts: Facts, noun: str) -> list[str]:
    """Write how well the estimated times foretold the measured ones."""
    if not checks:
        return []
    rows = [line([noun, "link", "estimated, s", "measured, s", "measured / estimated"]), "|---|---|---:|---:|---:|"]
    for check in checks:
        pair = [MISSING if value is None else seconds(value) for value in (check.estimated, check.measured)]
        share = f"{check.measured / check.estimated:.2f}" if check.measured and check.estimated else MISSING
        rows.append(line([check.label, check.link, *pair, share]))
    return [f"Time to loss of the whole training over the link, seed {facts.seeds[0]}:", "\n".join(rows)]


CODEC_STYLE = Style(
    heading="##",
    learning=learning_cells,
    link=link_cells,
    long={
        "parameters": "trainable parameters",
        "loss": "validation loss",
        "forward": "bytes/token forward",
        "bytes/token": "both",
        "fewer": "fewer than dense",
        "s to loss": "time to loss, s",
        "faster": "faster than dense",
    },
    bytes="bytes per token and boundary",
    preamble=preamble,
)


def show(board: Board, facts: Facts, style: Style, console: Console) -> None:
    """Print the board."""
    noun = board.subject.noun
    learning = Table(title=f"{facts.name}: after {facts.tokens:,} tokens; {style.bytes}")
    speed = Table(title="seconds to the target" if board.target is None else f"seconds to validation loss {board.target:.4f}")
    for number, name in enumerate(style.learning(board.standings[0], 1)):
        learning.add_column(name, justify="right" if number else "left", overflow="fold")
    speed.add_column(noun, overflow="fold")
    for link in facts.links:
        for number, name in enumerate(style.link(board.standings[0], link)):
            speed.add_column(f"\n{name}" if number else f"{link}\n{name}", justify="right")
    speed.add_column("peak\nMB", justify="right")
    for heading, standings in grouped(board.standings):
        for table in (learning, speed) if heading else ():
            table.add_row(heading, style="bold")
        for each in standings:
            learning.add_row(*style.learning(each, len(facts.seeds)).values())
            speed.add_row(each.label, *[text for link in facts.links for text in style.link(each, link).values()], memory_text(each))
    console.print(learning)
    if facts.links:
        console.print(speed)
