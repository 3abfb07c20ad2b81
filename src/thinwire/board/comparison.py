"""Run a comparison: check everything, make the rows that are missing, score them, and write the board."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from thinwire.board.cases import Case, beside, prepare
from thinwire.board.measure import BUSY, NO_MATTER, add_turn, disturbance, finished, learn, train_over
from thinwire.board.plots import draw_plots
from thinwire.board.report import Facts, TimeCheck, markdown, pictures, plots_of, write_page
from thinwire.board.request import Request
from thinwire.board.rows import Row, curve_of, read_row
from thinwire.board.score import Board, Pace, SpecRows, find_target, score, steps_to, value_at
from thinwire.config.sections import RunConfig
from thinwire.util.files import write_atomic

Rows = dict[tuple[str, Any], Row | None]


class Comparison:
    """The rows of a comparison: those that are there, and how the others are made."""

    def __init__(self, request: Request, cases: list[Case]) -> None:
        """Read every row that is there, so that one of other settings is refused before anything trains."""
        self.request, self.cases = request, cases
        self.seeds = request.seeds or (cases[0].config.seed,)
        first, pairs = self.seeds[0], [*product(cases, request.links)]
        self.learn: Rows = {
            (case.spec.slug, seed): self.read(case, case.learn_path(seed), case.learning(seed), case.immaterial)
            for case, seed in product(cases, self.seeds)
        }
        self.speed: Rows = {
            (case.spec.slug, link): read_row(case.speed_path(link), case.timed(link, request.speed_steps), NO_MATTER)
            for case, link in pairs
        }
        self.end_to_end: Rows = {
            (case.spec.slug, link): self.read(case, case.end_to_end_path(first, link), case.over(link, first))
            for case, link in (pairs if request.end_to_end else ())
        }
        self.failed: list[str] = []

    def read(self, case: Case, path: Path, config: RunConfig, ignored: frozenset[str] = frozenset()) -> Row | None:
        """Read the row of a training; where there is none yet, refuse a run folder that it could not be made from."""
        row = read_row(path, config, ignored)
        if row is None and not self.request.redraw:
            finished(case.run_of(path), config, ignored)
        return row

    def make(self, say: Callable[[str], None], live: bool) -> None:
        """Make the rows that are missing; one that fails leaves the others their turn."""
        asked, first = self.request, self.seeds[0]
        for seed, case in product(self.seeds, self.cases):
            if self.learn[case.spec.slug, seed] is None:
                self.attempt("learn", (case.spec.slug, seed), partial(learn, case, seed, live), say)
        for link, turn, case in product(asked.links, range(asked.repeats), self.cases):
            row = self.speed[case.spec.slug, link]
            if row is None or len(row["turns"]) <= turn:
                self.attempt("speed", (case.spec.slug, link), partial(add_turn, case, link, asked.speed_steps, live), say)
        for case, link in product(self.cases, asked.links if asked.end_to_end else ()):
            if self.end_to_end[case.spec.slug, link] is None:
                self.attempt("end_to_end", (case.spec.slug, link), partial(train_over, case, link, first, live), say)

    def attempt(self, kind: str, key: tuple[str, Any], make: Callable[[], Row], say: Callable[[str], None]) -> None:
        """Make one row and say in a line how it went."""
        rows: Rows = getattr(self, kind)
        started, title = time.monotonic(), f"{kind.replace('_', ' ')} {key[0]} {'seed' if kind == 'learn' else 'on'} {key[1]}"
        try:
            row = rows[key] = make()
            outcome = describe_speed(row["turns"][-1]) if kind == "speed" else f"validation loss {[*curve_of(row).values()][-1]:.4f}"
        except (ValueError, RuntimeError) as error:  # torch raises RuntimeError, out of memory included
            outcome = f"failed: {error}"
            self.failed.append(f"{title}: {error}")
        done = sum(row is not None for row in rows.values())
        say(f"[{done}/{len(rows)}] {title}: {outcome} ({time.monotonic() - started:.0f} s)")

    def by_spec(self) -> list[SpecRows]:
        """Return what is there, spec by spec."""
        found = []
        for case in self.cases:
            slug = case.spec.slug
            learnt = [row for seed in self.seeds if (row := self.learn[slug, seed])]
            speeds = {link: row for link in self.request.links if (row := self.speed[slug, link])}
            found.append(SpecRows(case.spec.text, case.spec.heading, case.warmup, learnt, speeds))
        return found

    def checks(self, board: Board) -> list[TimeCheck]:
        """Compare estimated and measured time to loss, both of the first seed."""
        found = []
        standings = {case.spec.slug: standing for case, standing in zip(self.cases, board.standings, strict=True)}
        for (slug, link), row in self.end_to_end.items():
            estimated = estimate(self.learn[slug, self.seeds[0]], standings[slug].links[link].pace, board.target)
            found.append(TimeCheck(standings[slug].label, link, estimated, measured(row, board.target)))
        return found

    def facts(self) -> Facts:
        """Return what stands above the table, taken from the rows so that drawing elsewhere changes nothing."""
        request, config = self.request, self.cases[0].config
        train, model = config.train, config.model
        learnt, speeds = [row for row in self.learn.values() if row], [row for row in self.speed.values() if row]
        worst = max((disturbance(turn) for row in speeds for turn in row["turns"]), default=0.0)
        return Facts(
            name=request.name,
            config=Path(request.config).stem,
            steps=train.steps,
            tokens=train.steps * train.batch * model.context,
            seeds=self.seeds,
            links=request.links,
            own_target=request.target is not None,
            line=request.line,
            versions=tuple(sorted({row["torch"] for row in [*learnt, *speeds]})),
            cores=tuple(sorted({row["cores"] for row in speeds})),
            disturbed=worst if worst > BUSY else 0.0,
            setting=request.subject.setting(config),
            notes=self.notes(),
        )

    def notes(self) -> tuple[str, ...]:
        """Say what the figures do not show."""
        pairs = zip(self.cases, self.by_spec(), strict=True)
        return tuple(note for case, rows in pairs for note in case.subject.notes(rows, case.meeting, case.config.train.validate_every))


def describe_speed(turn: Row) -> str:
    """Say how long a step took, and whether that means anything."""
    others = disturbance(turn)
    return f"{turn['seconds_per_step']:.3f} s per step" + (
        f", beside other work ({others:.1f} cores): worth little" if others > BUSY else ""
    )


def estimate(learnt: Row | None, pace: Pace | None, target: float | None) -> float | None:
    """Return steps to the target x seconds per step of one learning row."""
    reached = steps_to(curve_of(learnt), target) if learnt and target is not None else None
    return pace.time(reached.steps) if pace and reached else None


def measured(row: Row | None, target: float | None) -> float | None:
    """Return the training seconds at which an end-to-end row reached the target."""
    reached = steps_to(curve_of(row), target) if row and target is not None else None
    if row is None or reached is None:
        return None
    clock = {0: 0.0} | {int(step): seconds for step, seconds in row["seconds"].items()}
    return value_at(clock, reached.steps)


@dataclass(frozen=True)
class Compared:
    """What a comparison has found, and where it is written."""

    board: Board
    facts: Facts
    rows: list[Row]
    """Every row there is, of all kinds: those with a `curve` tell of learning, those with `turns` of speed."""
    failed: list[str]
    """Rows that could not be made, and why."""
    table: Path
    page: Path | None
    """Of all boards, where there is one."""
    drawn: str
    """Where the plots are, or why there are none."""


def run_comparison(request: Request, say: Callable[[str], None] = lambda text: None, live: bool = False) -> Compared:
    """Make the rows of a comparison that are missing, and write its board; `live` shows every training on this terminal."""
    request, cases, note = beside(request, prepare(request))
    if note:
        say(note)
    comparison = Comparison(request, cases)
    if not request.redraw:
        try:
            comparison.make(say, live)
        except KeyboardInterrupt:
            say("stopped; the same command goes on from here")
            raise
    rows, facts = comparison.by_spec(), comparison.facts()
    target = find_target(rows, facts.steps, request.subject) if request.target is None else request.target
    board = score(rows, request.links, target, request.subject)
    drawn, table = drawn_plots(board, request), request.out / f"{request.name}.md"
    images = [] if request.subject.page else pictures(request.out, request.name)
    text = markdown(board, facts, comparison.checks(board))
    write_atomic(table, "\n".join([text, *(f"{image}\n" for image in images)]).encode())
    page = write_page(request.out) if request.subject.page else None
    every = [row for kind in (comparison.learn, comparison.speed, comparison.end_to_end) for row in kind.values() if row]
    return Compared(board, facts, every, comparison.failed, table, page, drawn)


def drawn_plots(board: Board, request: Request) -> str:
    """Draw the plots if matplotlib is there; return what to say about them."""
    folder = plots_of(request.out, request.name)
    try:
        draw_plots(board, request.links, folder)
    except ModuleNotFoundError as error:
        install = "in the checkout: pip install -c constraints.txt -e '.[plot]'"
        return f"no plots: {error.name} is not installed; {install}, then: {request.line}"
    return f"plots: {folder}"
