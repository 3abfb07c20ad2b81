"""What earlier versions wrote, in the form of today: an exchange was once one text, `replicas.exchange = "powersgd:rank=4"`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from thinwire.config.options import arguments_of, options_from_spec, spec_of
from thinwire.config.values import as_table, fit
from thinwire.util.notices import note

EXCHANGE = "replicas.exchange"


def modern_arguments(argv: list[str]) -> list[str]:
    """Return a command line with the options of today, and say which those are."""
    found: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name != f"--{EXCHANGE}":
            found.append(token)
            continue
        text = value if equals else next(tokens, "")
        options = options_from_spec("exchange", text)
        # All of them: what that text did not say had its default, whatever a config said.
        found += arguments_of("exchange", options)
        given = [f"--exchange.{option} {value}" for option, value in as_given(text)]
        hint(f"{name} {text}", " ".join([f"--exchange.name {options.name}", *given]))
    return found


def modern_table(table: dict[str, Any], where: str, *, told: bool) -> dict[str, Any]:
    """Return the tables of a TOML file with the sections of today; say which those are if the file is somebody's own."""
    text = as_table(table.get("replicas", {}), where, "replicas").get("exchange")
    if text is None:
        return table
    if "exchange" in table:
        raise ValueError(f"{where} has both [exchange] and, in [replicas], exchange, its earlier form; leave the latter out")
    options = options_from_spec("exchange", fit(str, text, f"{where}: {EXCHANGE}"))
    if told:
        given = [f"{option} = {value}" for option, value in as_given(text)]
        hint(f'{where}: exchange = "{text}" in [replicas]', ", ".join([f'[exchange] name = "{options.name}"', *given]))
    replicas = {key: value for key, value in table["replicas"].items() if key != "exchange"}
    return table | {"replicas": replicas, "exchange": asdict(options)}


def modern_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that were written down by name, such as those of a row of a comparison, by the names of today."""
    kept = {name: value for name, value in settings.items() if name != EXCHANGE}
    if EXCHANGE not in settings:
        return kept
    options = asdict(options_from_spec("exchange", settings[EXCHANGE]))
    return kept | {f"exchange.{name}": value for name, value in options.items()}


def earlier_settings(settings: Mapping[str, Any], exchange: Any) -> dict[str, Any]:
    """Return settings as earlier versions named them: a hash of them stays what it was."""
    return {name: value for name, value in settings.items() if not name.startswith("exchange.")} | {EXCHANGE: spec_of(exchange)}


def as_given(text: str) -> list[tuple[str, str]]:
    """List the options of a SPEC as they are written in it."""
    return [(option, value) for item in text.partition(":")[2].split(",") if item for option, _, value in [item.partition("=")]]


def hint(before: str, now: str) -> None:
    """Say how something is written today."""
    note(f"{before} is now {now}")
