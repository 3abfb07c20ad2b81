"""Settings as text: TOML into a `RunConfig` and back, packaged configs by name, and the hash that workers compare.

What the settings are stands in `config/sections.py` and beside each codec and exchange, which values are refused in `limits.py` and
`run/check.py`, the command line in `command_line.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from thinwire.config.earlier import modern_table
from thinwire.config.options import CHOSEN, options_from_table
from thinwire.config.sections import RunConfig
from thinwire.config.values import fit, from_table, near, toml_value
from thinwire.util.shown import shown

CONFIG_FILE = "config.toml"
LOCAL = frozenset({"device", "data.cache", "train.seconds", "train.stuck_seconds", "train.threads"})
LOCAL |= {"link.profile", "link.pace_mbps", "link.ping_seconds", "link.silent_seconds", "link.reconnect_seconds"}
LOCAL |= {"pipeline.mode", "pipeline.engine", "link.standby_seconds", "memory.budget", "memory.folder", "data.source", "data.tokenizer"}
"""Fields that each machine or each start may choose for itself: they do not change what is learnt.

Paths of data are among them because it is the tokens that all workers compare, by their fingerprint.
"""
ADJUSTABLE = frozenset({"train.steps", "train.rate", "train.muon_rate", "train.warmup", "train.decay", "pipeline.schedule"})
ADJUSTABLE |= {"train.schedule", "train.floor", "train.embedding_rate", "train.head_rate", "train.vector_rate", "data.everywhere"}
"""Fields that all workers agree on and that a resume may change: they say how to go on, not what was done."""
RESHAPING = frozenset({"pipeline.stages", "pipeline.split", "pipeline.microbatches"})
"""Fields that are a run's shape: all its workers agree on them, and a resume may change them."""
LATER: dict[str, Any] = {"model.architecture": "llama", "model.head_dim": None, "model.ffn_kind": "swiglu"}
LATER |= {"model.rope_kind": "default", "model.rope_factor": 1.0, "model.rope_context": None, "model.rope_slow": 1.0}
LATER |= {"model.rope_fast": None, "model.rope_attention_factor": None, "model.rope_truncate": True}
LATER |= {"model.window": None, "model.window_layers": None, "model.qk_norm": "none", "model.attention_bias": "none"}
LATER |= {"model.ffn_bias": False, "model.norm_reorder": False, "model.logit_cap": 0.0, "model.separator": None}
LATER |= {"data.everywhere": False, "data.loss": "all", "data.buffer": None}
LATER |= {"adapter.rank": 0, "adapter.targets": "q_proj,v_proj", "adapter.alpha": 16.0, "adapter.dropout": 0.0}
LATER |= {"adapter.base_format": None, "adapter.base": ""}
LATER |= {"model.zero_outputs": False, "model.fused_loss": False, "train.schedule": "linear", "train.floor": 0.0}
LATER |= {"train.ema": 0.0}
LATER |= {"train.muon_warmup": 0, "train.embedding_rate": None, "train.head_rate": None, "train.vector_rate": None}
LATER |= {"codec.entropy": False, "codec.rate": None, "codec.backward_rate": None, "codec.dead_zone": 0.6}
LATER |= {"codec.rate_penalty": 1.5e-3, "codec.sample": 3.0, "codec.boundary_rates": None, "codec.dither": "none", "codec.steer": "step"}
"""Fields that earlier releases did not have, with what these did: with that value workers and checkpoints do not compare them."""


def flatten(config: RunConfig) -> dict[str, Any]:
    """List every field by its name, such as `train.steps`."""
    settings: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        settings |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return settings


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """List the part of the settings that all workers of a run must agree on."""
    return {name: value for name, value in flatten(config).items() if name not in LOCAL and LATER.get(name, ...) != value}


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


def from_toml(text: str, where: str = CONFIG_FILE, *, told: bool = False) -> RunConfig:
    """Read settings from TOML; `where` names the file in errors; whose file it is may be told how its earlier forms are written today."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError too
        raise ValueError(f"{where} is not valid TOML: {shown(error)}") from None
    table = modern_table(table, where, told=told)
    hints = get_type_hints(RunConfig)
    values: dict[str, Any] = {section: options_from_table(section, table.pop(section, {}), where) for section in CHOSEN}
    for name, value in table.items():
        hint = hints.get(name)
        if hint is None:
            raise ValueError(f"{where} has an unknown entry {shown(repr(name))}; {near(name, hints)}")
        values[name] = from_table(hint, value, where, name) if dataclasses.is_dataclass(hint) else fit(hint, value, f"{where}: {name}")
    return RunConfig(**values)


def packaged() -> list[str]:
    """Name the configs that come with the package."""
    files = resources.files("thinwire.config") / "packaged"
    return sorted(file.name.removesuffix(".toml") for file in files.iterdir() if file.name.endswith(".toml"))


def load_config(config: str) -> RunConfig:
    """Load a packaged config by name or a `.toml` file by path."""
    if config.endswith(".toml"):
        return read_config(Path(config), told=True)
    if config not in packaged():
        raise ValueError(f"there is no config {config!r}; a file of your own must end in .toml; {near(config, packaged())}")
    return from_toml((resources.files("thinwire.config") / "packaged" / f"{config}.toml").read_text(encoding="utf-8"), f"config {config}")


def read_config(path: Path, *, told: bool = False) -> RunConfig:
    """Read a settings file: that of a run, or one of somebody who is told of earlier forms in it."""
    try:
        return from_toml(path.read_text(encoding="utf-8"), str(path), told=told)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; packaged configs are {', '.join(packaged())}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from None
