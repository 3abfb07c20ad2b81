"""The words of `thinwire train`: a config by name or file, overrides for each of its fields, and what a resumed run may change.

    thinwire train --config NAME|FILE --run DIR [--resume | --from RUN] [--track NAME ...] [--section.field VALUE ...]

Without --config the packaged config `laptop` is used; without --run the run goes to `runs/CONFIG-CODEC-SEED`, such as
`runs/laptop-subspace-0`. Text is read by `config/toml.py`, values are judged by `run/check.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from thinwire.config.choices import choices
from thinwire.config.earlier import modern_arguments
from thinwire.config.mistakes import meant, refuse_expanded
from thinwire.config.options import CHOSEN, choose_options, owners
from thinwire.config.registry import CODECS, TRACKERS
from thinwire.config.sections import RunConfig
from thinwire.config.toml import (
    ADJUSTABLE,
    CONFIG_FILE,
    LOCAL,
    RESHAPING,
    flatten,
    from_toml,
    load_config,
    read_config,
    shared_hash,
    to_toml,
)
from thinwire.metrics.trackers.open import check_names
from thinwire.model.cut import cut_layers
from thinwire.run.check import check
from thinwire.run.folder import is_begun, is_free, is_half_forked

__all__ = [
    "JoinCommand",
    "TrainCommand",
    "check",
    "flatten",
    "from_toml",
    "load_config",
    "parse_join",
    "parse_train",
    "shared_hash",
    "to_toml",
]

DEFAULT_CONFIG = "laptop"


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """What `thinwire train` was asked to do."""

    config: RunConfig
    run: Path
    resume: bool
    fork: Path | None = None
    """The run from whose newest checkpoint this new one begins."""
    track: tuple[str, ...] = ()
    """Trackers beside the metrics file."""


def parse_train(argv: list[str]) -> TrainCommand:
    """Read the words of `thinwire train` into a checked command."""
    argv = modern_arguments(argv)
    words = scan(argv)
    track = named_trackers(argv)
    fork = None
    if "from" in words and "help" not in words:
        fork, run, config = forked(argv, words)
    elif "resume" in words and "help" not in words:
        run, config = resume(argv, words)
    else:
        config = parse(argv, load_config(words.get("config") or DEFAULT_CONFIG))
        run = run_folder(words, config)
        refuse_used(run)
    check(config)
    return TrainCommand(config=resolve(config), run=run, resume="resume" in words or fork is not None, fork=fork, track=track)


@dataclass(frozen=True, kw_only=True)
class JoinCommand(TrainCommand):
    """What `thinwire join` was asked to do."""

    roster: Path
    keys: Path
    stage: int | None
    """None: the place of whichever machine is lost."""
    replica: int
    listen: str | None


def parse_join(argv: list[str]) -> JoinCommand:
    """Read the words of `thinwire join`: a roster, --stage, --keys, and all the words of `thinwire train`."""
    own = argparse.ArgumentParser(
        prog="thinwire join",
        allow_abbrev=False,
        description="Run one stage of a roster on this machine. All the words of `thinwire train` can follow, the same everywhere.",
    )
    own.add_argument("roster", type=Path, help="roster file that every worker has (`thinwire roster`)")
    place = own.add_mutually_exclusive_group(required=True)
    place.add_argument("--stage", type=int, help="stage that this machine runs, from 0")
    own.add_argument("--replica", type=int, default=0, help="copy of the pipeline that this machine belongs to, from 0 (default: 0)")
    place.add_argument("--standby", action="store_true", help="wait, and take the place of a machine that is lost")
    own.add_argument("--keys", type=Path, default=Path("keys"), help="folder that `thinwire keys` made here (default: keys)")
    own.add_argument("--listen", help="address to listen on if it is not the roster's, such as 0.0.0.0:29400 behind a forwarded port")
    if argv and argv[0].startswith("--") and argv[0] != "--help":
        raise ValueError(
            f"the first word after `thinwire join` is the roster file, not {argv[0]}; write: thinwire join ROSTER --stage N ..."
        )
    mine, rest = own.parse_known_args(argv)
    if "from" in scan(rest):
        raise ValueError(
            "--from is a word of `thinwire train`: on several machines copy each run folder, and go on in the copies with --resume"
        )
    if "run" not in scan(rest):
        copy = f"replica-{mine.replica}-" if mine.replica else ""
        rest += ["--run", "runs/standby" if mine.standby else f"runs/{copy}stage-{mine.stage}"]
    train = parse_train([*rest, "--pipeline.mode", "workers"])
    given = {entry.name: getattr(train, entry.name) for entry in fields(TrainCommand)}
    return JoinCommand(**given, roster=mine.roster, keys=mine.keys, stage=mine.stage, replica=mine.replica, listen=mine.listen)


def scan(argv: list[str]) -> dict[str, str | None]:
    """List the words that were given, with the value that follows each."""
    words: dict[str, str | None] = {}
    for index, token in enumerate(argv):
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            following = argv[index + 1] if index + 1 < len(argv) and not argv[index + 1].startswith("--") else None
            words[name.replace("-", "_")] = value if equals else following
    return words | ({"help": None} if "-h" in argv else {})


def named_trackers(argv: list[str]) -> tuple[str, ...]:
    """List the names that stand behind --track."""
    names: list[str] = []
    word = ""
    for token in argv:
        if token.startswith("-"):
            word, equals, value = token.partition("=")
            names += [value] if word == "--track" and equals else []
        elif word == "--track":
            names.append(token)
    if "--track" in argv and not names:
        raise ValueError(
            f"--track stands without a name; choose from {', '.join(TRACKERS.names())}, or leave it out: metrics/*.jsonl is always written"
        )
    return check_names(names)


def run_folder(words: dict[str, str | None], config: RunConfig | None) -> Path:
    """Return the run folder that was given, else runs/CONFIG-CODEC-SEED."""
    if given := words.get("run"):
        return Path(given)
    assert config is not None
    return Path("runs") / f"{Path(words.get('config') or DEFAULT_CONFIG).stem}-{config.codec.name}-{config.seed}"


def refuse_used(run: Path) -> None:
    """Refuse to begin a run in a folder that holds something worth keeping."""
    refuse_half_forked(run)
    if not is_free(run):
        raise ValueError(f"the run folder {run} exists; choose another with --run DIR, or add --resume to go on with that run")


def refuse_half_forked(run: Path) -> None:
    """Refuse a folder whose fork broke off: only another fork may use it."""
    if is_half_forked(run):
        raise ValueError(
            f"{run} is half a run: the checkpoint that it was to begin from was not copied to the end; give thinwire train --from RUN "
            f"--run {run} again, or delete the folder"
        )


def parse(argv: list[str], base: RunConfig) -> RunConfig:
    """Override the fields of a base config with the words that were given."""
    import tyro  # not at the top: only a command line needs it

    argv = modern_arguments(argv)
    words = scan(argv)
    chosen = {section: choose_options(section, getattr(base, section), words.get(f"{section}.name")) for section in CHOSEN}
    base = dataclasses.replace(base, **chosen)
    refuse_unknown(words, base)
    refuse_expanded(argv, {"config", "run", *flatten(base)})
    kind = options_class(base)
    default = kind(**{entry.name: getattr(base, entry.name) for entry in fields(RunConfig)})
    description = "Train a model. Every field of the config can be overridden; --codec.name NAME --help lists that codec's options, "
    description += "--exchange.name NAME --help those of an exchange between replicas."
    description += "".join(f"\n\n{word}: {names}." for word, names in choices().items())
    given = tyro.cli(kind, prog="thinwire train", description=description, args=argv, default=default, use_underscores=True)
    return RunConfig(**{entry.name: getattr(given, entry.name) for entry in fields(RunConfig)})


def resolve(config: RunConfig) -> RunConfig:
    """Write down where the data is, wherever the run goes on, and how many layers are free: then another cut is the same network."""

    data = config.data
    config = dataclasses.replace(
        config, data=dataclasses.replace(data, source=absolute(data.source, "stdlib"), tokenizer=absolute(data.tokenizer, "train"))
    )
    if config.model.free_layers is not None or not CODECS.load(config.codec.name).constrains:
        return config
    last = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)[-1]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, free_layers=len(last)))


def absolute(source: str, name: str) -> str:
    """Return a path or glob of data from the root on; a name that stands for data, or is of the Hub, stays."""
    return source if source == name or source.startswith("hf:") else os.path.abspath(os.path.expanduser(source))


def options_class(base: RunConfig) -> Any:
    """Make the dataclass whose fields are the options of the command line, those of the base's codec and exchange among them."""
    import tyro

    def word(kind: Any, text: str, *marks: Any) -> Any:
        return Annotated[(kind, tyro.conf.arg(help=text), *marks)]

    added = [
        *((section, type(getattr(base, section)), field()) for section in CHOSEN),
        ("config", word(str, "Packaged config, or a file that ends in .toml."), field(default=DEFAULT_CONFIG)),
        ("run", word(str, "Run folder."), field(default="runs/CONFIG-CODEC-SEED")),
        ("resume", word(bool, "Go on with the run in that folder.", tyro.conf.FlagCreatePairsOff), field(default=False)),
        ("fork", word(str, "Begin the new run from the newest checkpoint of this one.", tyro.conf.arg(name="from")), field(default="")),
        ("track", word(tuple[str, ...], f"Draw curves too, with {' or '.join(TRACKERS.names())} or both."), field(default=())),
    ]
    return dataclasses.make_dataclass("Options", added, bases=(RunConfig,), frozen=True, kw_only=True)


def refuse_unknown(words: dict[str, str | None], base: RunConfig) -> None:
    """Raise ValueError for an option that does not exist, with the one that was probably meant."""
    values = flatten(base)
    negated = {".no_".join(word.rsplit(".", 1)) for word, value in values.items() if isinstance(value, bool)}
    known = {"config", "run", "resume", "from", "track", "help", *values, *negated}
    for word in words:
        section, _, option = word.partition(".")
        if section in CHOSEN and option and word not in known:
            chosen = getattr(base, section)
            options = ", ".join(entry.name for entry in fields(chosen))
            raise ValueError(f"--{word}: the {section} {chosen.name!r} has no option {option!r}; it has {options}{elsewhere(word)}")
        if word not in known:
            hint = elsewhere(word) if word not in {name.rpartition(".")[2] for name in known} else ""
            raise ValueError(f"unknown option --{word}; thinwire train --help lists all options; {meant(word, known)}{hint}")


def elsewhere(word: str) -> str:
    """Say which codecs or exchanges have an option of this name, if any."""
    section, _, option = word.rpartition(".")
    found = {each: owners(each, option) for each in ([section] if section in CHOSEN else CHOSEN)}
    return "".join(
        f"; --{each}.{option} is an option of {', '.join(names)}: choose one with --{each}.name" for each, names in found.items() if names
    )


def resume(argv: list[str], words: dict[str, str | None]) -> tuple[Path, RunConfig]:
    """Find the run to go on with and its settings, changed only where a started run can change."""
    named, placed = words.get("config"), words.get("run")
    # The same command with --resume added must work: so a config that is named has to say what the run's own settings say.
    wanted = parse(argv, load_config(named or DEFAULT_CONFIG)) if named or not placed else None
    run = run_folder(words, wanted)
    refuse_half_forked(run)
    if not (run / CONFIG_FILE).is_file() and is_begun(run):  # killed before its settings were written
        return run, wanted or parse(argv, load_config(named or DEFAULT_CONFIG))
    if not (run / CONFIG_FILE).is_file():
        raise ValueError(f"cannot resume: {run / CONFIG_FILE} does not exist; check --run, or leave --resume out to start a new run")
    return run, adapted(argv, words, run, wanted if named else None)


def forked(argv: list[str], words: dict[str, str | None]) -> tuple[Path, Path, RunConfig]:
    """Find the run to begin from, the folder of the new one, and its settings, changed only where a started run can change."""
    source, named = words["from"], words.get("config")
    if source is None or words.get("run") is None or "resume" in words:
        raise ValueError("--from RUN begins a new run where RUN stands: write thinwire train --from RUN --run NEW, without --resume")
    run = run_folder(words, None)
    if not (Path(source) / CONFIG_FILE).is_file():
        raise ValueError(f"--from {source}: {Path(source) / CONFIG_FILE} does not exist; give the folder that `thinwire train --run` wrote")
    if not is_half_forked(run):
        refuse_used(run)
    return Path(source), run, adapted(argv, words, Path(source), parse(argv, load_config(named)) if named else None)


def adapted(argv: list[str], words: dict[str, str | None], run: Path, wanted: RunConfig | None) -> RunConfig:
    """Return a run's own settings with the words that were given, refusing what differs in them or in a config that was named."""
    named = words.get("config")
    stored = read_config(run / CONFIG_FILE)
    config = parse(argv, reshaped(stored, words))
    if wanted:
        wanted = settled(wanted, stored)
        refuse_other_settings(run, stored, wanted, f"--config {named} and the words beside it give")
        if named and named.endswith(".toml"):  # a packaged one nobody has changed: naming it says nothing new
            config = adjusted(config, wanted, named)
    refuse_other_settings(run, stored, config, "the command line gives")
    refuse_other_microbatches(run, stored, config)
    return config


def settled(wanted: RunConfig, stored: RunConfig) -> RunConfig:
    """Return wanted settings with the free layers that the cut at the start of a run has settled."""
    if wanted.model.free_layers is not None:
        return wanted
    return dataclasses.replace(wanted, model=dataclasses.replace(wanted.model, free_layers=stored.model.free_layers))


def for_resume(wanted: RunConfig | None, run: Path) -> RunConfig:
    """Return the settings with which a run goes on: its own, or wanted ones, which differ only where a started run can change."""
    refuse_half_forked(run)
    if not (run / CONFIG_FILE).is_file():
        raise ValueError(f"cannot resume: {run / CONFIG_FILE} does not exist; check the run folder, or leave resume out to start a new run")
    stored = read_config(run / CONFIG_FILE)
    if wanted is None:
        return stored
    wanted = settled(wanted, stored)
    refuse_other_settings(run, stored, wanted, "the config gives")
    refuse_other_microbatches(run, stored, wanted)
    return wanted


def adjusted(config: RunConfig, wanted: RunConfig, named: str) -> RunConfig:
    """Return a run's settings with what a resume may change as a file, and the words beside it, have it; say what that changes."""
    before, after = flatten(config), flatten(wanted)
    changed = [word for word in sorted(ADJUSTABLE) if before[word] != after[word]]
    for word in changed:
        section, _, name = word.partition(".")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: after[word]})})
        print(f"thinwire: note: {word} is {after[word]} from now on, by {named}; it was {before[word]}", file=sys.stderr, flush=True)
    return config


def reshaped(stored: RunConfig, words: dict[str, str | None]) -> RunConfig:
    """Forget the run's split where another number of stages is asked for and no split with it."""
    if words.get("pipeline.stages") in (None, str(stored.pipeline.stages)) or "pipeline.split" in words:
        return stored
    return dataclasses.replace(stored, pipeline=dataclasses.replace(stored.pipeline, split=None))


def refuse_other_microbatches(run: Path, stored: RunConfig, config: RunConfig) -> None:
    """Refuse to feed a codec other microbatches if what it sends depends on them."""

    before, after = stored.pipeline.microbatches, config.pipeline.microbatches
    if before != after and CODECS.load(config.codec.name).depends_on_microbatch:
        raise ValueError(
            f"cannot resume {run} with pipeline.microbatches {after}, it has {before}: what the codec {config.codec.name!r} sends depends "
            "on the microbatch; leave that out, or start a new run with another --run"
        )


def refuse_other_settings(run: Path, stored: RunConfig, other: RunConfig, giver: str) -> None:
    """Raise ValueError for the first field, fixed once a run has started, that differs."""
    before, after = flatten(stored), flatten(other)
    for word in before | after:
        if word not in LOCAL | RESHAPING | ADJUSTABLE and before.get(word) != after.get(word):
            raise ValueError(
                f"cannot resume {run}: its {word} is {before.get(word)}, {giver} {after.get(word)}; a started run keeps it: "
                "leave that out, or start a new run with another --run"
            )
