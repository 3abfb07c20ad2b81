"""Change settings by their names, as Python gives them: {"train.steps": 100, "codec.name": "dense"}."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from thinwire.config.mistakes import meant
from thinwire.config.options import CHOSEN, choose_options, options_from_table
from thinwire.config.sections import RunConfig
from thinwire.config.toml import flatten
from thinwire.config.values import fit, from_table

WHERE = "options"
Settings = TypeVar("Settings", bound=RunConfig)


def override(config: Settings, options: Mapping[str, Any]) -> Settings:
    """Return the same settings but for some; a codec or exchange that is named keeps what was set before and it has too."""
    for section in CHOSEN:
        if (name := options.get(f"{section}.name")) is not None:
            chosen = choose_options(section, getattr(config, section), fit(str, name, f"{WHERE}: {section}.name"))
            config = dataclasses.replace(config, **{section: chosen})
    known = flatten(config)
    for name in options:
        if name not in known and name.partition(".")[0] not in CHOSEN:  # what a codec lacks is told with the codec's name
            raise ValueError(f"{WHERE}: there is no setting {name!r}; {meant(str(name), known).replace('--', '')}")
    changed: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, _, field = name.rpartition(".")
        changed.setdefault(section, {})[field] = value
    hints = get_type_hints(type(config))
    for section, values in changed.items():
        if not section:
            config = dataclasses.replace(config, **{name: fit(hints[name], value, f"{WHERE}: {name}") for name, value in values.items()})
            continue
        table = dataclasses.asdict(getattr(config, section)) | values
        new = options_from_table(section, table, WHERE) if section in CHOSEN else from_table(hints[section], table, WHERE, section)
        config = dataclasses.replace(config, **{section: new})
    return config
