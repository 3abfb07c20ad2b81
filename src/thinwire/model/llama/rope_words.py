"""Rotary positions in the words of `config.json`: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.config.sections import ModelConfig
from thinwire.model.huggingface import real_number, whole_number
from thinwire.model.llama.rope import fastest_turns, stretch_factor, trained_context

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
BASE = 10_000.0


def rope_to_json(model: ModelConfig) -> dict[str, Any]:
    """Describe rotary positions, in the words of both versions: each passes over what it does not know."""
    part: dict[str, Any] = {"rope_type": model.rope_kind}
    if model.rope_kind != "default":
        part["factor"] = model.rope_factor
    if model.rope_kind in ("llama3", "yarn"):
        slow, fast = ("low_freq_factor", "high_freq_factor") if model.rope_kind == "llama3" else ("beta_slow", "beta_fast")
        part |= {slow: model.rope_slow, fast: fastest_turns(model), "original_max_position_embeddings": trained_context(model)}
    if model.rope_kind == "yarn":
        part |= {"truncate": model.rope_truncate}
        part |= {} if model.rope_attention_factor is None else {"attention_factor": model.rope_attention_factor}
    words: dict[str, Any] = {"rope_parameters": part | {"rope_theta": model.rope_theta}, "rope_theta": model.rope_theta}
    return words if model.rope_kind == "default" else words | {"rope_scaling": part}


def positions_of(model: ModelConfig, positions: int) -> int:
    """Return their longest sequence: with `dynamic` it is what the frequencies were trained on, and longer ones are read all the same."""
    return model.rope_context if model.rope_kind == "dynamic" and model.rope_context is not None else positions


def rope_from_json(table: dict[str, Any], where: Path, longest: int) -> dict[str, Any]:
    """Return our settings of the same positions, with their longest sequence; refuse kinds that we do not have."""
    name = "rope_scaling" if table.get("rope_scaling") else "rope_parameters"
    part = table.get(name) or {}
    if not isinstance(part, dict):
        raise ValueError(f"{where}: {name} is {part!r}; it must be an object such as {{'rope_type': 'default'}}")
    kind = part.get("rope_type", part.get("type", "default"))
    if kind not in KINDS or part.get("partial_rotary_factor", 1) not in (1, None):
        raise ValueError(
            f"{where}: {name} is {part!r}; our rotary positions turn whole heads and are of the kinds {', '.join(KINDS)}: choose a model "
            "with one of them, such as the one that this was extended from"
        )
    theta = part.get("rope_theta") or table.get("rope_theta")
    settings: dict[str, Any] = {"rope_theta": real_number({"rope_theta": theta}, "rope_theta", where, BASE)}
    if kind == "default":
        return settings
    settings |= {"rope_kind": kind}
    if kind == "dynamic":
        settings["rope_context"] = longest
    if kind in ("llama3", "yarn"):
        # The outer word is that of models that keep it apart; it counts first in transformers too.
        outer = table.get("original_max_position_embeddings")
        settings["rope_context"] = whole_number(part if outer is None else table, "original_max_position_embeddings", where, longest)
    ratio = longest / settings["rope_context"] if kind == "yarn" else None
    settings["rope_factor"] = real_number(part, "factor", where, ratio)
    if kind == "llama3":
        names = {"rope_slow": "low_freq_factor", "rope_fast": "high_freq_factor"}
        settings |= {ours: real_number(part, theirs, where) for ours, theirs in names.items()}
    return settings | (yarn_from_json(part, where, settings["rope_factor"]) if kind == "yarn" else {})


def yarn_from_json(part: dict[str, Any], where: Path, factor: float) -> dict[str, Any]:
    """Return what yarn alone has; `mscale` and `mscale_all_dim` are another way to write an attention factor."""
    given = part.get("attention_factor")
    if given is None and part.get("mscale") and part.get("mscale_all_dim"):
        above, below = (real_number(part, name, where) for name in ("mscale", "mscale_all_dim"))
        given = stretch_factor(factor, above) / stretch_factor(factor, below)
    betas = {"rope_slow": ("beta_slow", 1.0), "rope_fast": ("beta_fast", 32.0)}
    found = {ours: real_number({theirs: part.get(theirs) or default}, theirs, where) for ours, (theirs, default) in betas.items()}
    factor_given = None if given is None else real_number({"attention_factor": given}, "attention_factor", where)
    return found | {"rope_attention_factor": factor_given, "rope_truncate": part.get("truncate") is not False}
