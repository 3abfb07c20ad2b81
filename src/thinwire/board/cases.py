"""From specs to settings, all checked before anything trains: each case is one spec of a comparison and the configs it runs with."""

from __future__ import annotations

import dataclasses
import math
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.board.request import OURS, Request, Spec, parse_spec
from thinwire.board.rows import corpus_name, data_settings, row_settings, trained_on
from thinwire.board.subjects import Subject
from thinwire.config import registry
from thinwire.config.command_line import parse_config
from thinwire.config.options import CHOSEN
from thinwire.config.sections import RunConfig
from thinwire.config.toml import flatten, load_config, to_toml
from thinwire.config.values import from_table, near
from thinwire.pipeline.inprocess import build_codec
from thinwire.run.check import check, resolve

EQUAL = {"train.batch", "train.validation_sequences", "model.context", "model.vocabulary", "data.cache"}
EQUAL |= {
    "data.source",
    "data.tokenizer",
    "data.text_column",
    "data.max_tokens",
    "data.loss",
    "data.buffer",
    "model.separator",
    "replicas.count",
}
"""Settings that all specs of a comparison have in common: losses are compared at equal tokens of the same data."""

LONGEST_PERIOD = 50
"""Steps beyond which what happens once does not matter for the speed."""


@dataclass(frozen=True)
class Case:
    """One spec of a comparison."""

    spec: Spec
    config: RunConfig
    """Settings of its learning rows, of the first seed."""
    plain: RunConfig
    """What the command line gives with this method's name alone."""
    typed: tuple[str, ...]
    """That command line."""
    out: Path
    """Folder of the rows and, in its folder `runs`, of the runs they are made from."""
    subject: Subject
    corpus: str = ""
    """What names bear besides, where rows of another corpus have the plain ones."""

    @property
    def warmup(self) -> int:
        """Return how many steps at the start cross uncompressed."""
        return self.subject.warmup(self.config)

    @property
    def meeting(self) -> int:
        """Return how many steps go from one meeting of replicas to the next; 0: there are no replicas."""
        return self.subject.meeting(self.config)

    @property
    def period(self) -> int:
        """Return after how many steps something comes again that not every step has: a shared update, a move of the basis; 0: nothing."""
        codec = build_codec(self.config)
        own = next((step + 1 for step in range(LONGEST_PERIOD) if codec.shares_after(step) or codec.moves_after(step)), 0)
        return math.lcm(own or 1, self.meeting) if self.meeting > 1 else own

    @property
    def immaterial(self) -> frozenset[str]:
        """Name the settings that change the results of a learning row by rounding only."""
        return frozenset() if self.subject.keeps_microbatches(self.config) else frozenset({"pipeline.microbatches"})

    @property
    def stem(self) -> str:
        """Return what names of row files begin with."""
        return self.spec.slug + self.subject.grid(self.config) + (f"-{self.corpus}" if self.corpus else "")

    def name(self, seed: int) -> str:
        """Name a learning row."""
        return f"{self.stem}-{self.config.train.steps}-{seed}"

    def learn_path(self, seed: int) -> Path:
        """Say where a learning row is."""
        return self.out / "learn" / f"{self.name(seed)}.json"

    def speed_path(self, link: str) -> Path:
        """Say where a speed row is."""
        return self.out / "speed" / f"{self.stem}-{link}.json"

    def end_to_end_path(self, seed: int, link: str) -> Path:
        """Say where the row of a training over a link is."""
        return self.out / "end_to_end" / f"{self.name(seed)}-{link}.json"

    def run_of(self, row: Path) -> Path:
        """Return the folder of the run that a row is made from."""
        return self.out / "runs" / row.stem

    def learning(self, seed: int) -> RunConfig:
        """Return the settings of a learning row."""
        config = replace(self.config, seed=seed)
        if self.subject.keeps_microbatches(config):
            return config
        # In one process larger microbatches are faster and, up to rounding, the gradients are the same.
        most = max(1, config.pipeline.microbatches // 4)
        fewer = next(count for count in range(most, 0, -1) if config.train.batch % count == 0)
        return replace(config, pipeline=replace(config.pipeline, microbatches=fewer))

    def over(self, link: str, seed: int) -> RunConfig:
        """Return the settings of the same training in workers over a link."""
        config = replace(self.config, seed=seed)
        return replace(config, pipeline=replace(config.pipeline, mode="workers"), link=replace(config.link, profile=link))

    def timed(self, link: str, steps: int) -> RunConfig:
        """Return the settings of a speed measurement: nothing but steps, and those of the compressed phase."""
        config = self.over(link, self.config.seed)
        short = replace(config.train, steps=steps, validate_every=0, checkpoint_every=0, validation_sequences=1)
        return self.subject.compressed(replace(config, train=short))

    def command(self, config: RunConfig) -> str:
        """Write the `thinwire train` line that has these settings."""
        return shlex.join(["thinwire", "train", *self.typed, *options_between(flatten(resolve(self.plain)), flatten(config))])


def options_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Write the options of `thinwire train` that lead from some settings to others of the same method."""
    options = []
    for name, value in after.items():
        if value == before[name]:
            continue
        if isinstance(value, bool):
            options.append(f"--{name}" if value else "--" + ".no_".join(name.rsplit(".", 1)))
        else:
            options += [f"--{name}", str(value)]
    return options


def prepare(request: Request) -> list[Case]:
    """Make the cases of a comparison, or raise ValueError for the first thing that cannot work."""
    subject, options = request.subject, list(request.options)
    start = parse_config(options, load_config(request.config))
    subject.refuse_config(start)
    seeds, steps = request.seeds or (start.seed,), request.steps or start.train.steps
    train, pipeline = replace(start.train, steps=steps, seconds=None), replace(start.pipeline, mode=subject.mode)
    base = replace(start, seed=seeds[0], train=train, pipeline=pipeline, link=replace(start.link, profile="open"))
    specs = request.specs or tuple(parse_spec(name, subject) for name in registry.CODECS.names())
    cases: list[Case] = []
    for spec in specs:
        try:
            naming, plain = subject.plain(spec, start)
            typed = ("--config", request.config, *options, *naming)
            cases.append(Case(spec, with_spec(spec, base, subject), plain, typed, request.out, subject))
            check_case(cases[-1], request.links, seeds)
        except ValueError as error:
            raise ValueError(f"spec {spec.text}: {error}") from None
    check_together(cases, request)
    return cases


def with_spec(spec: Spec, base: RunConfig, subject: Subject) -> RunConfig:
    """Put a spec's method and settings into those of all."""
    config = subject.apply(spec, base)
    for name, value in spec.settings:
        config = replace_setting(config, name, value)
    check(config)
    return resolve(config)


def replace_setting(config: RunConfig, name: str, value: Any) -> RunConfig:
    """Set one dotted name of the settings."""
    if name in EQUAL or name in OURS:
        raise ValueError(f"{name} must be the same for all specs; {OURS.get(name, f'give it as --{name} behind the specs')}")
    section, _, field = name.partition(".")
    sections = {entry.name for entry in dataclasses.fields(config) if dataclasses.is_dataclass(getattr(config, entry.name))}
    known = sections - CHOSEN.keys()
    if section not in known:
        raise ValueError(f"there is no section {section!r} of the settings for {name}; {near(section, known)}")
    table = dataclasses.asdict(getattr(config, section)) | {field: value}
    return replace(config, **{section: from_table(type(getattr(config, section)), table, "settings", section)})


def check_case(case: Case, links: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """Refuse a case that cannot train, here or over the links."""
    case.subject.refuse_config(case.config)
    build_codec(case.config)
    to_toml(case.config)
    for seed in seeds:
        check(case.learning(seed))
    for link in links:
        check(case.over(link, seeds[0]))


def check_together(cases: list[Case], request: Request) -> None:
    """Refuse a list that cannot be scored, and a folder that cannot be written: this comes last, since it makes the folder."""
    for number, case in enumerate(cases):
        for other in cases[:number]:
            if case.config == other.config:
                raise ValueError(f"the specs {other.spec.text!r} and {case.spec.text!r} are the same settings; leave one out")
    if request.target is None:
        check_reference(cases, request.subject.reference)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=request.out):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {request.out}: {error.strerror}; choose another folder with --out") from None


def check_reference(cases: list[Case], name: str) -> None:
    """Refuse a list without the spec whose loss is the target, or with one that is not validated in time."""
    reference = next((case for case in cases if case.spec.text == name), None)
    if reference is None:
        raise ValueError(f"there is no plain `{name}` among the specs, whose loss would be the target; add {name}, or give --target LOSS")
    every, steps = reference.config.train.validate_every, reference.config.train.steps
    if not 1 <= every <= steps / 2:
        raise ValueError(
            f"train.validate_every is {every}, but the target is {name}'s validation loss after half of {steps} steps; "
            f"set --train.validate_every to {'1' if steps < 4 else f'1 to {steps // 2}'}, or give --target LOSS"
        )


def rows_of(case: Case, request: Request) -> Iterator[Path]:
    """Yield where the rows of a case would be."""
    for seed in request.seeds or (case.config.seed,):
        yield case.learn_path(seed)
        yield from (case.end_to_end_path(seed, link) for link in request.links)
    yield from (case.speed_path(link) for link in request.links)


def beside(request: Request, cases: list[Case]) -> tuple[Request, list[Case], str]:
    """Rename board and cases if the folder holds rows of another corpus under their names, or already some of this one under others.

    Return also what to tell the user of it.
    """
    wanted, name = data_settings(row_settings(cases[0].config)), corpus_name(cases[0].config)
    renamed = [replace(case, corpus=name) for case in cases]
    known, others = ([trained_on(row, case.run_of(row)) for case in each for row in rows_of(case, request)] for each in (renamed, cases))
    if wanted not in known and all(found is None or found == wanted for found in others):
        return request, cases, ""
    text = f"{request.out} holds rows of another corpus: those of this one, and its board, have {name} in their names"
    return replace(request, name=f"{request.name}-{name}"), renamed, text
