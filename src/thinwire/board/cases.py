"""From specs to settings, all checked before anything trains: each case is one spec of a comparison and the configs it runs with."""

from __future__ import annotations

import dataclasses
import math
import shlex
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.board.command import OURS, CompareCommand
from thinwire.board.exchanges import compressed, identity, meeting_every, refuse_wrong_replicas
from thinwire.board.spec import Spec, parse_spec
from thinwire.board.subject import CODECS, EXCHANGES, Subject
from thinwire.codecs.base import LossyOptions
from thinwire.config import registry
from thinwire.config.sections import RunConfig
from thinwire.config.toml import flatten, from_table, load_config, near, to_toml
from thinwire.pipeline.inprocess import build_codec
from thinwire.replicas.exchange import without_warmup
from thinwire.run.check import check
from thinwire.run.settings import chosen_codec, parse, resolve, scan

EQUAL = {"train.batch", "train.validation_sequences", "model.context", "model.vocabulary", "data.cache"}
EQUAL |= {"data.source", "data.tokenizer", "data.text_column", "data.max_tokens", "replicas.count"}
"""Words that all specs of a comparison have in common: losses are compared at equal tokens of the same data."""

RUNS = "runs"
"""Folder of a comparison's runs, in that of its rows and boards."""
LONGEST_PERIOD = 50
"""Steps beyond which what happens once does not matter for the speed."""


@dataclass(frozen=True)
class Case:
    """One spec of a comparison."""

    spec: Spec
    config: RunConfig
    """Settings of its learning rows, of the first seed."""
    plain: RunConfig
    """What the command line gives with this codec's name alone."""
    typed: tuple[str, ...]
    """That command line."""
    runs: Path
    """Folder of its runs."""
    subject: Subject = CODECS
    corpus: str = ""
    """What names bear besides, where rows of another corpus have the plain ones."""

    @property
    def warmup(self) -> int:
        """Return how many steps at the start cross uncompressed."""
        if self.subject is EXCHANGES:
            return without_warmup(self.config.replicas.exchange)[1]
        return self.config.codec.warmup if isinstance(self.config.codec, LossyOptions) else 0

    @property
    def period(self) -> int:
        """Return after how many steps something comes again that not every step has: a shared update, a move of the basis; 0: nothing."""
        codec = build_codec(self.config)
        own = next((step + 1 for step in range(LONGEST_PERIOD) if codec.shares_after(step) or codec.moves_after(step)), 0)
        return math.lcm(own or 1, self.meeting) if self.meeting > 1 else own

    @property
    def meeting(self) -> int:
        """Return how many steps go from one meeting of replicas to the next; 0: there are no replicas."""
        return meeting_every(self.config) if self.subject is EXCHANGES else 0

    @property
    def depends_on_microbatch(self) -> bool:
        """Tell whether another number of microbatches is another training."""
        return registry.CODECS.load(self.config.codec.name).depends_on_microbatch

    @property
    def keeps_microbatches(self) -> bool:
        """Tell whether learning rows have the microbatches of all others: workers have no use for larger ones."""
        return self.depends_on_microbatch or self.subject is EXCHANGES

    @property
    def immaterial(self) -> frozenset[str]:
        """Name the settings that change the results of a learning row by rounding only."""
        return frozenset() if self.keeps_microbatches else frozenset({"pipeline.microbatches"})

    @property
    def stem(self) -> str:
        """Return what names of row files begin with; boards of other numbers of replicas have rows of their own in the same folder."""
        grid = f"-{self.config.replicas.count}x{self.config.pipeline.stages}" if self.subject is EXCHANGES else ""
        return self.spec.slug + grid + (f"-{self.corpus}" if self.corpus else "")

    def name(self, seed: int) -> str:
        """Name a learning row."""
        return f"{self.stem}-{self.config.train.steps}-{seed}"

    def learning(self, seed: int) -> RunConfig:
        """Return the settings of a learning row."""
        config = replace(self.config, seed=seed)
        if self.keeps_microbatches:
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
        config = replace(config, train=short)
        if self.subject is EXCHANGES:
            return compressed(config)
        return replace(config, codec=replace(config.codec, warmup=0)) if self.warmup else config

    def command(self, config: RunConfig) -> str:
        """Write the `thinwire train` line that has these settings."""
        words = [*self.typed, *(["--codec.name", self.spec.codec] if self.spec.codec else [])]
        before = flatten(resolve(self.plain))
        for word, value in flatten(config).items():
            if word == "codec.name" or value == before[word]:
                continue
            if isinstance(value, bool):
                words.append(f"--{word}" if value else "--" + ".no_".join(word.rsplit(".", 1)))
            else:
                words += [f"--{word}", str(value)]
        return shlex.join(["thinwire", "train", *words])


def prepare(command: CompareCommand) -> list[Case]:
    """Make the cases of a comparison, or raise ValueError for the first thing that cannot work."""
    start = parse(list(command.words), scan(list(command.words)), load_config(command.config))
    refuse_wrong_replicas(start, command.subject)
    seeds, steps = command.seeds or (start.seed,), command.steps or start.train.steps
    mode: Any = "workers" if command.subject is EXCHANGES else "inprocess"
    train, pipeline = replace(start.train, steps=steps, seconds=None), replace(start.pipeline, mode=mode)
    base = replace(start, seed=seeds[0], train=train, pipeline=pipeline, link=replace(start.link, profile="open"))
    typed = ("--config", command.config, *command.words)
    specs = command.specs or tuple(map(parse_spec, registry.CODECS.names()))
    cases: list[Case] = []
    for spec in specs:
        try:
            config = settings_of(spec, base)
            plain = replace(start, codec=chosen_codec(start.codec, spec.codec))
            cases.append(Case(spec, config, plain, typed, command.out / RUNS, command.subject))
            check_case(cases[-1], command.links, seeds)
        except ValueError as error:
            raise ValueError(f"spec {spec.text}: {error}") from None
    check_together(cases, command)
    return cases


def settings_of(spec: Spec, base: RunConfig) -> RunConfig:
    """Put a spec's words into the settings; what it does not say of its codec has the codec's own defaults."""
    config = base
    if spec.codec is not None:
        options = {"name": spec.codec, **dict(spec.options)}
        config = replace(base, codec=from_table(registry.CODECS.load(spec.codec).Options, options, "options", "codec"))
    for word, value in spec.words:
        config = replace_word(config, word, value)
    check(config)
    return resolve(config)


def replace_word(config: RunConfig, word: str, value: Any) -> RunConfig:
    """Set one dotted word of the settings."""
    if word in EQUAL or word in OURS:
        raise ValueError(f"{word} must be the same for all specs; {OURS.get(word, f'give it as --{word} behind the specs')}")
    section, _, field = word.partition(".")
    known = {entry.name for entry in dataclasses.fields(config) if dataclasses.is_dataclass(getattr(config, entry.name))} - {"codec"}
    if section not in known:
        raise ValueError(f"there is no section {section!r} of the settings for {word}; {near(section, known)}")
    table = dataclasses.asdict(getattr(config, section)) | {field: value}
    return replace(config, **{section: from_table(type(getattr(config, section)), table, "settings", section)})


def check_case(case: Case, links: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """Refuse a case that cannot train, here or over the links."""
    if case.config.pipeline.stages < 2 and case.subject is CODECS:
        raise ValueError(f"pipeline.stages is {case.config.pipeline.stages}, so nothing crosses a boundary; choose 2 or more")
    build_codec(case.config)
    to_toml(case.config)
    for seed in seeds:
        check(case.learning(seed))
    for link in links:
        check(case.over(link, seeds[0]))


def check_together(cases: list[Case], command: CompareCommand) -> None:
    """Refuse a list that cannot be scored, and a folder that cannot be written: this comes last, since it makes the folder."""
    for number, case in enumerate(cases):
        for other in cases[:number]:
            if identity(case.config) == identity(other.config):
                raise ValueError(f"the specs {other.spec.text!r} and {case.spec.text!r} are the same settings; leave one out")
    if command.target is None:
        name = command.subject.reference
        reference = next((case for case in cases if case.spec.text == name), None)
        if reference is None:
            raise ValueError(
                f"there is no plain `{name}` among the specs, whose loss would be the target; add {name}, or give --target LOSS"
            )
        every, steps = reference.config.train.validate_every, reference.config.train.steps
        if not 1 <= every <= steps / 2:
            raise ValueError(
                f"train.validate_every is {every}, but the target is {name}'s validation loss after half of {steps} steps; "
                f"set --train.validate_every to {'1' if steps < 4 else f'1 to {steps // 2}'}, or give --target LOSS"
            )
    try:
        command.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=command.out):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {command.out}: {error.strerror}; choose another folder with --out") from None
