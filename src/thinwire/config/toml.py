"""Settings as text: TOML into a `RunConfig` and back, packaged configs by name, and the hash that workers compare.

What the settings are stands in `config/sections.py` and beside each codec, which values are refused in `run/check.py`, the command line in
`run/settings.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import tomllib
import types
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.config.sections import RunConfig
from thinwire.util.shown import shown

CONFIG_FILE = "config.toml"
DEFAULT_CODEC = "subspace"
LOCAL = frozenset({"device", "data.cache", "train.seconds", "train.stuck_seconds", "train.threads"})
LOCAL |= {"link.profile", "link.pace_mbps", "link.ping_seconds", "link.silent_seconds", "link.reconnect_seconds", "pipeline.mode"}
LOCAL |= {"link.standby_seconds", "memory.budget", "memory.folder", "data.source", "data.tokenizer"}
"""Fields that each machine or each start may choose for itself: they do not change what is learnt.

Paths of data are among them because it is the tokens that all workers compare, by their fingerprint.
"""
ADJUSTABLE = frozenset({"train.steps", "train.rate", "train.muon_rate", "train.warmup", "train.decay", "pipeline.schedule"})
"""Fields that all workers agree on and that a resume may change: they say how to go on, not what was done."""
RESHAPING = frozenset({"pipeline.stages", "pipeline.split", "pipeline.microbatches"})
"""Fields that are a run's shape: all its workers agree on them, and a resume may change them."""
LATER = {"model.architecture": "llama"}
"""Fields that earlier releases did not have, with what these did: with that value workers and checkpoints do not compare them."""
TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false", type(None): "left out"}


def flatten(config: RunConfig) -> dict[str, Any]:
    """List every field by its word, such as `train.steps`."""
    words: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        words |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return words


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """List the part of the settings that all workers of a run must agree on."""
    return {word: value for word, value in flatten(config).items() if word not in LOCAL and LATER.get(word, ...) != value}


def shared_hash(config: RunConfig) -> str:
    """Hash that part."""
    return hashlib.sha256(json.dumps(shared_settings(config), sort_keys=True).encode()).hexdigest()


def to_toml(config: RunConfig) -> str:
    """Write the settings as TOML that `from_toml` reads back exactly; unset fields are left out."""
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    sections = {name: part for name, part in parts.items() if dataclasses.is_dataclass(part)}
    lines = [f"{name} = {toml_value(part)}" for name, part in parts.items() if name not in sections]
    for name, section in sections.items():
        lines += ["", f"[{name}]"]
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if value is not None:
                lines.append(f"{field.name} = {toml_value(value)}")
            elif field.default is not None:
                raise ValueError(f"{name}.{field.name} is unset, which TOML cannot say; give it a value (its default is {field.default!r})")
    return "\n".join(lines) + "\n"


def toml_value(value: str | int | float | bool) -> str:
    """Write one TOML value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the delete character, which JSON leaves bare.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, (int, float)), f"settings are texts, numbers and booleans, not {value!r}"
    return repr(value)


def from_toml(text: str, where: str = CONFIG_FILE) -> RunConfig:
    """Read settings from TOML; `where` names the file in errors."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError too
        raise ValueError(f"{where} is not valid TOML: {shown(error)}") from None
    hints = get_type_hints(RunConfig)
    values: dict[str, Any] = {}
    codec = table.pop("codec", {})
    for name, value in table.items():
        hint = hints.get(name)
        if hint is None:
            raise ValueError(f"{where} has an unknown entry {shown(repr(name))}; {near(name, hints)}")
        values[name] = from_table(hint, value, where, name) if dataclasses.is_dataclass(hint) else fit(hint, value, f"{where}: {name}")
    return RunConfig(**values, codec=codec_from_table(codec, where))


def codec_from_table(table: Any, where: str) -> Any:
    """Read the options of the codec that the table names."""
    from thinwire.config.registry import CODECS

    table = {"name": DEFAULT_CODEC, **as_table(table, where, "codec")}
    kind = CODECS.load(fit(str, table["name"], f"{where}: codec.name")).Options
    return from_table(kind, table, where, "codec")


def as_table(value: Any, where: str, section: str) -> dict[str, Any]:
    """Return the value if it is a table, or refuse it."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {section} is {shown(repr(value))}; it must be a table, [{section}]")
    return value


def from_table(kind: Any, table: Any, where: str, section: str) -> Any:
    """Make a section's dataclass from its TOML table."""
    hints = get_type_hints(kind)
    for key in as_table(table, where, section):
        if key not in hints:
            title = f"codec {shown(repr(table['name']))}" if section == "codec" else f"[{section}]"
            raise ValueError(f"{where}: {title} has no option {shown(repr(key))}; {near(key, hints)}")
    return kind(**{key: fit(hints[key], value, f"{where}: {section}.{key}") for key, value in table.items()})


def fit(hint: Any, value: Any, where: str) -> Any:
    """Return the value in the field's type, or refuse it."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where} is {shown(value, 50)}; whole numbers have 64 bits at most")
    for kind in kinds:
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if kind is float and type(value) in (int, float):
            return float(value)
        if type(value) is kind:
            return value
    allowed = [", ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else TYPE_NAMES.get(kind, str(kind)) for kind in kinds]
    raise ValueError(f"{where} is {shown(repr(value))}; it must be {' or '.join(allowed)}")


def near(word: str, known: Iterable[str], dashes: str = "") -> str:
    """Suggest the word that was probably meant, else list them all."""
    names = sorted(known)
    match = difflib.get_close_matches(word[:100], names, n=1)
    return f"did you mean {dashes}{match[0]}?" if match else f"there are {', '.join(dashes + name for name in names)}"


def packaged() -> list[str]:
    """Name the configs that come with the package."""
    files = resources.files("thinwire.config") / "packaged"
    return sorted(file.name.removesuffix(".toml") for file in files.iterdir() if file.name.endswith(".toml"))


def load_config(config: str) -> RunConfig:
    """Load a packaged config by name or a `.toml` file by path."""
    if config.endswith(".toml"):
        return read_config(Path(config))
    if config not in packaged():
        raise ValueError(f"there is no config {config!r}; a file of your own must end in .toml; {near(config, packaged())}")
    return from_toml((resources.files("thinwire.config") / "packaged" / f"{config}.toml").read_text(encoding="utf-8"), f"config {config}")


def read_config(path: Path) -> RunConfig:
    """Read a settings file."""
    try:
        return from_toml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; packaged configs are {', '.join(packaged())}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from None
