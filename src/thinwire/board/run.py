"""Run a comparison: check everything, make the rows that are missing, then draw what the rows say."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire.board import board as boards
from thinwire.board.cases import Case, prepare
from thinwire.board.command import CompareCommand
from thinwire.board.corpus import beside
from thinwire.board.exchange_table import EXCHANGE_STYLE
from thinwire.board.exchanges import notes
from thinwire.board.learn import finished, learn
from thinwire.board.plot import draw
from thinwire.board.rows import Row, curve_of, read_row
from thinwire.board.score import Board, Entry, Pace, find_target, score, steps_to, value_at
from thinwire.board.speed import BUSY, NO_MATTER, add_turn, disturbance
from thinwire.board.subject import EXCHANGES
from thinwire.board.table import CODEC_STYLE, Check, Facts, markdown, show
from thinwire.board.whole import learn_together, train_over
from thinwire.config.sections import RunConfig
from thinwire.util.files import write_atomic

Rows = dict[tuple[str, Any], Row | None]


@dataclass
class Comparison:
    """The rows of a comparison: where they are, and those that are there."""

    command: CompareCommand
    cases: list[Case]

    def __post_init__(self) -> None:
        """Read every row that is there, so that one of other settings is refused before anything trains."""
        self.seeds = self.command.seeds or (self.cases[0].config.seed,)
        self.learn: Rows = {(case.spec.slug, seed): self.read_learn(case, seed) for case in self.cases for seed in self.seeds}
        pairs = [(case, link) for case in self.cases for link in self.command.links]
        self.speed: Rows = {(case.spec.slug, link): self.read_speed(case, link) for case, link in pairs}
        wanted = pairs if self.command.end_to_end else []
        self.whole: Rows = {(case.spec.slug, link): self.read_whole(case, link) for case, link in wanted}
        self.failed: list[str] = []

    def learn_path(self, case: Case, seed: int) -> Path:
        return self.command.out / "learn" / f"{case.name(seed)}.json"

    def speed_path(self, case: Case, link: str) -> Path:
        return self.command.out / "speed" / f"{case.stem}-{link}.json"

    def whole_path(self, case: Case, link: str) -> Path:
        return self.command.out / "end_to_end" / f"{case.name(self.seeds[0])}-{link}.json"

    def read_learn(self, case: Case, seed: int) -> Row | None:
        return self.read(case, self.learn_path(case, seed), case.learning(seed), case.immaterial)

    def read_whole(self, case: Case, link: str) -> Row | None:
        return self.read(case, self.whole_path(case, link), case.over(link, self.seeds[0]))

    def read(self, case: Case, path: Path, config: RunConfig, ignored: frozenset[str] = frozenset()) -> Row | None:
        """Read the row of a training; where there is none yet, refuse a run folder that it could not be made from."""
        row = read_row(path, config, ignored)
        if row is None and not self.command.redraw:
            finished(case.runs / path.stem, config, ignored)
        return row

    def read_speed(self, case: Case, link: str) -> Row | None:
        return read_row(self.speed_path(case, link), case.timed(link, self.command.speed_steps), NO_MATTER)

    def make(self) -> None:
        """Make the rows that are missing; one that fails leaves the others their turn."""
        asked, first = self.command, self.seeds[0]
        teach = learn_together if asked.subject is EXCHANGES else learn
        for seed, case in product(self.seeds, self.cases):
            if self.learn[case.spec.slug, seed] is None:
                self.attempt("learn", (case.spec.slug, seed), partial(teach, case, seed, self.learn_path(case, seed)))
        for link, turn, case in product(asked.links, range(asked.repeats), self.cases):
            row, path = self.speed[case.spec.slug, link], self.speed_path(case, link)
            if row is None or len(row["turns"]) <= turn:
                self.attempt("speed", (case.spec.slug, link), partial(add_turn, case, link, asked.speed_steps, path))
        for case, link in product(self.cases, asked.links if asked.end_to_end else ()):
            if self.whole[case.spec.slug, link] is None:
                self.attempt("whole", (case.spec.slug, link), partial(train_over, case, link, first, self.whole_path(case, link)))

    def attempt(self, kind: str, key: tuple[str, Any], make: Callable[[], Row]) -> None:
        """Make one row and say in a line how it went."""
        rows: Rows = getattr(self, kind)
        started, title = time.monotonic(), f"{kind} {key[0]} {'seed' if kind == 'learn' else 'on'} {key[1]}"
        try:
            row = rows[key] = make()
            outcome = describe_speed(row["turns"][-1]) if kind == "speed" else f"validation loss {[*curve_of(row).values()][-1]:.4f}"
        except (ValueError, RuntimeError) as error:  # torch raises RuntimeError, out of memory included
            outcome = f"failed: {error}"
            self.failed.append(f"{title}: {error}")
        done = sum(row is not None for row in rows.values())
        print(f"[{done}/{len(rows)}] {title}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)

    def entries(self) -> list[Entry]:
        """Return what is there, spec by spec."""
        found = []
        for case in self.cases:
            slug = case.spec.slug
            learnt = [row for seed in self.seeds if (row := self.learn[slug, seed])]
            speeds = {link: row for link in self.command.links if (row := self.speed[slug, link])}
            found.append(Entry(case.spec.text, case.spec.heading, case.warmup, learnt, speeds))
        return found

    def checks(self, board: Board) -> list[Check]:
        """Compare estimated and measured time to loss, both of the first seed."""
        found = []
        for (slug, link), row in self.whole.items():
            number = next(index for index, case in enumerate(self.cases) if case.spec.slug == slug)
            standing, learnt = board.standings[number], self.learn[slug, self.seeds[0]]
            estimated = estimate(learnt, standing.links[link].pace, board.target)
            found.append(Check(standing.label, link, estimated, measured(row, board.target)))
        return found

    def facts(self) -> Facts:
        """Return what stands above the table, taken from the rows so that drawing elsewhere changes nothing."""
        command, train, model = self.command, self.cases[0].config.train, self.cases[0].config.model
        learnt, speeds = [row for row in self.learn.values() if row], [row for row in self.speed.values() if row]
        worst = max((disturbance(turn) for row in speeds for turn in row["turns"]), default=0.0)
        return Facts(
            name=command.name,
            config=Path(command.config).stem,
            steps=train.steps,
            tokens=train.steps * train.batch * model.context,
            seeds=self.seeds,
            links=command.links,
            own_target=command.target is not None,
            line=command.line,
            versions=tuple(sorted({row["torch"] for row in [*learnt, *speeds]})),
            cores=tuple(sorted({row["cores"] for row in speeds})),
            disturbed=worst if worst > BUSY else 0.0,
            setting=self.setting(),
            notes=self.notes(),
        )

    def setting(self) -> str:
        """Say what the replicas of a board of exchanges are."""
        config = self.cases[0].config
        shape = f"{config.replicas.count} replicas of {config.pipeline.stages} stages, codec `{config.codec.name}`"
        return shape if self.command.subject is EXCHANGES else ""

    def notes(self) -> tuple[str, ...]:
        """Say what the figures do not show."""
        pairs = zip(self.cases, self.entries(), strict=True) if self.command.subject is EXCHANGES else ()
        return tuple(note for case, entry in pairs for note in notes(entry, case.meeting, case.config.train.validate_every))


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


def run(command: CompareCommand) -> None:
    """Make and draw a comparison."""
    command, cases = beside(command, prepare(command))
    comparison = Comparison(command, cases)
    if not command.redraw:
        try:
            comparison.make()
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here")
            raise
    entries, facts = comparison.entries(), comparison.facts()
    subject, style = command.subject, EXCHANGE_STYLE if command.subject is EXCHANGES else CODEC_STYLE
    target = find_target(entries, facts.steps, subject) if command.target is None else command.target
    board = score(entries, command.links, target, subject)
    path, plots = command.out / f"{command.name}.md", boards.plots_of(command.out, command.name)
    try:
        draw(board, command.links, plots)
        drawn = f"plots: {plots}"
    except ModuleNotFoundError as error:
        drawn = (
            f"no plots: {error.name} is not installed; in the checkout: pip install -c constraints.txt -e '.[plot]', then: {command.line}"
        )
    pictures = [] if subject.page else boards.pictures(command.out, command.name)
    text = markdown(board, facts, comparison.checks(board), style)
    write_atomic(path, "\n".join([text, *(f"{picture}\n" for picture in pictures)]).encode())
    together = f", all boards: {boards.write_page(command.out)}" if subject.page else ""
    show(board, facts, style, Console(markup=False) if sys.stdout.isatty() else Console(width=120, markup=False))
    print(f"table: {path}{together}\n{drawn}")
    if comparison.failed:
        raise ValueError(f"{len(comparison.failed)} rows are missing; {comparison.failed[0]}; leave that spec out, or change it")
