"""Sliding windows: which layers have one, and how many tokens are seen. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.config.sections import ModelConfig


def sliding_layers(model: ModelConfig) -> set[int]:
    """Return the layers whose attention sees `model.window` tokens."""
    if model.window is None:
        return set()
    if model.window_layers is None:
        return set(range(model.layers))
    found: set[int] = set()
    for part in model.window_layers.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"model.window_layers is {model.window_layers!r}; write layers and ranges with commas, such as 0-3,6")
        low, high = int(first), int(last or first)
        if not low <= high < model.layers:
            raise ValueError(f"model.window_layers names {part.strip()}, the model has layers 0 to {model.layers - 1}; choose among these")
        found |= set(range(low, high + 1))
    return found


def window_of(model: ModelConfig, layer: int) -> int | None:
    """Return how many tokens a layer's attention sees; None: all."""
    return model.window if layer in sliding_layers(model) else None


def layers_text(layers: Iterable[int]) -> str:
    """Write layers as `model.window_layers` has them."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def seen_tokens(context: int, window: int | None) -> float:
    """Return how many tokens one looks at, itself included, as the mean over a sequence."""
    if window is None or window >= context:
        return (context + 1) / 2
    return (window * (window + 1) / 2 + (context - window) * window) / context
