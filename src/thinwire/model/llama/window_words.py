"""Sliding windows in the words of `config.json`: of every layer, or by `max_window_layers` or `layer_types` of some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.config.sections import ModelConfig
from thinwire.model.huggingface import whole_number
from thinwire.model.llama.family import Family
from thinwire.model.llama.window import layers_text, sliding_layers

FULL, SLIDING = "full_attention", "sliding_attention"


def windows_to_json(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Describe the windows of a model."""
    if family.window == "none":
        return {}
    if family.window == "every layer":
        return {"sliding_window": model.window}
    sliding = sliding_layers(model)
    return {
        "use_sliding_window": bool(sliding),
        "sliding_window": model.window if sliding else None,
        "max_window_layers": min(sliding, default=model.layers),
        "layer_types": [SLIDING if layer in sliding else FULL for layer in range(model.layers)],
    }


def windows_from_json(table: dict[str, Any], where: Path, family: Family, layers: int) -> dict[str, Any]:
    """Return our settings of the same windows."""
    kinds = table.get("layer_types")
    if family.window == "none":
        refuse_kinds(kinds, [FULL], where, family)
        return {}
    used = table.get("sliding_window") is not None and (family.window == "every layer" or bool(table.get("use_sliding_window")))
    window = whole_number(table, "sliding_window", where) if used else None
    if family.window == "every layer":
        refuse_kinds(kinds, [SLIDING if used else FULL], where, family)
        return {"window": window}
    refuse_kinds(kinds, [FULL, SLIDING] if used else [FULL], where, family)
    if kinds is not None and len(kinds) != layers:
        raise ValueError(f"{where}: layer_types names {len(kinds)} layers, num_hidden_layers is {layers}; mend the file")
    if window is None:
        return {}
    first = table.get("max_window_layers") or 0
    if type(first) is not int or first < 0:
        raise ValueError(f"{where}: max_window_layers is {first!r}; it must be a whole number of at least 0: mend the file")
    if kinds is None:  # as text at once: a damaged file may name any number of layers
        return {} if first >= layers else {"window": window, "window_layers": upper_layers(first, layers)}
    sliding = [layer for layer, kind in enumerate(kinds) if kind == SLIDING]
    if not sliding:
        return {}
    return {"window": window, "window_layers": None if len(sliding) == layers else layers_text(sliding)}


def upper_layers(first: int, layers: int) -> str | None:
    """Write the layers from one on, as `model.window_layers` has them; None: all."""
    return None if first == 0 else str(first) if first == layers - 1 else f"{first}-{layers - 1}"


def refuse_kinds(kinds: Any, known: list[str], where: Path, family: Family) -> None:
    """Refuse layers of another kind than the model can have by its other settings."""
    if kinds is None:
        return
    if not isinstance(kinds, list) or not all(kind in known for kind in kinds):
        raise ValueError(
            f"{where}: layer_types is {kinds!r}; by its other settings this {family.title} has layers of {' and '.join(known)} alone: "
            "choose another model, or mend the file"
        )
