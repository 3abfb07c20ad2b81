"""Options of what is chosen by name, a codec or an exchange: one grammar in TOML, on the command line and in a SPEC.

    [exchange]                  --exchange.name powersgd --exchange.rank 4          powersgd:rank=4
    name = "powersgd"
    rank = 4

The options of a choice are a frozen keyword-only dataclass beside its class, as its attribute `Options`: `name` and whatever it needs.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from typing import Any

from thinwire.config.registry import CODECS, EXCHANGES, Registry
from thinwire.config.values import as_table, fit, from_table, toml_value
from thinwire.util.shown import shown

CHOSEN: dict[str, Registry] = {"codec": CODECS, "exchange": EXCHANGES}
"""Sections whose options are those of the class that their `name` chooses."""
DEFAULT_NAMES = {"codec": "subspace", "exchange": "allreduce"}
FORM = "NAME[:OPTION=VALUE,...], such as powersgd:rank=4"


def options_from_table(section: str, table: Any, where: str) -> Any:
    """Read the options of what a section's table names."""
    table = {"name": DEFAULT_NAMES[section], **as_table(table, where, section)}
    name = fit(str, table["name"], f"{where}: {section}.name")
    return from_table(CHOSEN[section].load(name).Options, table, where, section, f"{section} {shown(repr(name))}")


def options_from_spec(section: str, text: str) -> Any:
    """Read the options that a SPEC gives; what it does not say has its default."""
    name, given = split_spec(text, section, FORM)
    return options_from_table(section, {**given, "name": name}, f"the spec {text!r}")


def spec_of(options: Any) -> str:
    """Write options as a SPEC, without those that have their defaults."""
    given = [(entry.name, getattr(options, entry.name)) for entry in fields(options) if getattr(options, entry.name) != entry.default]
    listed = [f"{name}={value if isinstance(value, str) else toml_value(value)}" for name, value in given if name != "name"]
    return ":".join([options.name, *([",".join(listed)] if listed else [])])


def arguments_of(section: str, options: Any) -> list[str]:
    """Write all options as they are given on the command line."""
    found: list[str] = []
    for entry in fields(options):
        value = getattr(options, entry.name)
        if isinstance(value, bool):
            found.append(f"--{section}.{'' if value else 'no_'}{entry.name}")
        else:
            found += [f"--{section}.{entry.name}", str(value)]
    return found


def choose_options(section: str, base: Any, name: str | None) -> Any:
    """Return the options of what a name chooses, with those that the base sets and that the choice has too."""
    if name is None or name == base.name:
        return base
    kind = CHOSEN[section].load(name).Options
    known = {entry.name for entry in fields(kind)}
    # Only what differs from its default was chosen; the rest is the new one's own to decide.
    kept = {entry.name: getattr(base, entry.name) for entry in fields(base) if getattr(base, entry.name) != entry.default}
    return kind(**{key: value for key, value in kept.items() if key in known} | {"name": name})


def owners(section: str, option: str) -> list[str]:
    """Name the built-in choices of a section that have an option."""
    known = CHOSEN[section]
    return [name for name in known.built_in if option in {entry.name for entry in fields(known.load(name).Options)}]


def split_spec(text: str, kind: str, form: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a SPEC; messages call its name a `kind` and show the `form`."""
    name, colon, listed = text.partition(":")
    if not name or (colon and not listed):
        raise ValueError(f"the spec {text!r} has no {'options after its colon' if name else kind}; write {form}")
    found: dict[str, Any] = {}
    for item in listed.split(",") if listed else ():
        option, equals, value = item.partition("=")
        if not (option and equals and value):
            raise ValueError(f"the spec {text!r} has {item!r} where OPTION=VALUE is expected; write {form}")
        if option in found:
            raise ValueError(f"the spec {text!r} gives {option} twice; leave one out")
        found[option] = read_value(value)
    return name, found


def read_value(text: str) -> Any:
    """Read a value as TOML would, else as plain text; `none` unsets."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
