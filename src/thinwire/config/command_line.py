"""Options of the command line: every field of the config by its dotted name, over a config by name or file.

    --config NAME|FILE --run DIR [--resume | --from RUN] [--track NAME ...] [--section.field VALUE ...]

Text is read by `config/toml.py`, values are judged by `run/check.py`; what a verb does with its options is the verb's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from dataclasses import field, fields
from typing import Annotated, Any

from thinwire.config.choices import choices
from thinwire.config.earlier import modern_arguments
from thinwire.config.mistakes import meant, refuse_expanded
from thinwire.config.options import CHOSEN, choose_options, owners
from thinwire.config.registry import TRACKERS
from thinwire.config.sections import RunConfig
from thinwire.config.toml import flatten

DEFAULT_CONFIG = "laptop"


def scan(argv: list[str]) -> dict[str, str | None]:
    """List the options that were given, with the value that follows each."""
    given: dict[str, str | None] = {}
    for index, token in enumerate(argv):
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            following = argv[index + 1] if index + 1 < len(argv) and not argv[index + 1].startswith("--") else None
            given[name.replace("-", "_")] = value if equals else following
    return given | ({"help": None} if "-h" in argv else {})


def parse_config(argv: list[str], base: RunConfig) -> RunConfig:
    """Override the fields of a base config with the options that were given."""
    import tyro  # not at the top: only a command line needs it

    argv = modern_arguments(argv)
    given = scan(argv)
    chosen = {section: choose_options(section, getattr(base, section), given.get(f"{section}.name")) for section in CHOSEN}
    base = dataclasses.replace(base, **chosen)
    refuse_unknown(given, base)
    argv = as_flags(argv, {name for name, value in flatten(base).items() if isinstance(value, bool)})
    refuse_expanded(argv, {"config", "run", *flatten(base)})
    kind = options_class(base)
    default = kind(**{entry.name: getattr(base, entry.name) for entry in fields(RunConfig)})
    description = "Train a model. Every field of the config can be overridden; --codec.name NAME --help lists that codec's options, "
    description += "--exchange.name NAME --help those of an exchange between replicas."
    description += "".join(f"\n\n{option}: {names}." for option, names in choices().items())
    read = tyro.cli(kind, prog="thinwire train", description=description, args=argv, default=default, use_underscores=True)
    return RunConfig(**{entry.name: getattr(read, entry.name) for entry in fields(RunConfig)})


def as_flags(argv: list[str], switches: Set[str]) -> list[str]:
    """Turn `--section.field true` and `false`, as a config file would say it, into the flags that the parser knows."""
    found: list[str] = []
    for token in argv:
        before = found[-1][2:].replace("-", "_") if found and found[-1].startswith("--") else ""
        if before in switches and token in ("true", "false"):
            section, _, name = before.rpartition(".")
            found[-1] = f"--{section}.{name}" if token == "true" else f"--{section}.no_{name}"
        else:
            found.append(token)
    return found


def options_class(base: RunConfig) -> Any:
    """Make the dataclass whose fields are the options of the command line, those of the base's codec and exchange among them."""
    import tyro

    def option(kind: Any, text: str, *marks: Any) -> Any:
        return Annotated[(kind, tyro.conf.arg(help=text), *marks)]

    added = [
        *((section, type(getattr(base, section)), field()) for section in CHOSEN),
        ("config", option(str, "Packaged config, or a file that ends in .toml."), field(default=DEFAULT_CONFIG)),
        ("run", option(str, "Run folder."), field(default="runs/CONFIG-CODEC-SEED")),
        ("resume", option(bool, "Go on with the run in that folder.", tyro.conf.FlagCreatePairsOff), field(default=False)),
        ("fork", option(str, "Begin the new run from the newest checkpoint of this one.", tyro.conf.arg(name="from")), field(default="")),
        ("track", option(tuple[str, ...], f"Draw curves too, with {' or '.join(TRACKERS.names())} or both."), field(default=())),
    ]
    return dataclasses.make_dataclass("Options", added, bases=(RunConfig,), frozen=True, kw_only=True)


def refuse_unknown(given: Mapping[str, str | None], base: RunConfig) -> None:
    """Raise ValueError for an option that does not exist, with the one that was probably meant."""
    values = flatten(base)
    negated = {".no_".join(name.rsplit(".", 1)) for name, value in values.items() if isinstance(value, bool)}
    known = {"config", "run", "resume", "from", "track", "help", *values, *negated}
    for name in given:
        section, _, option = name.partition(".")
        if section in CHOSEN and option and name not in known:
            chosen = getattr(base, section)
            options = ", ".join(entry.name for entry in fields(chosen))
            raise ValueError(f"--{name}: the {section} {chosen.name!r} has no option {option!r}; it has {options}{elsewhere(name)}")
        if name not in known:
            hint = elsewhere(name) if name not in {other.rpartition(".")[2] for other in known} else ""
            raise ValueError(f"unknown option --{name}; thinwire train --help lists all options; {meant(name, known)}{hint}")


def elsewhere(name: str) -> str:
    """Say which codecs or exchanges have an option of this name, if any."""
    section, _, option = name.rpartition(".")
    found = {each: owners(each, option) for each in ([section] if section in CHOSEN else CHOSEN)}
    return "".join(
        f"; --{each}.{option} is an option of {', '.join(names)}: choose one with --{each}.name" for each, names in found.items() if names
    )
