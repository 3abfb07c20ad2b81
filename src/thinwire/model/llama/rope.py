"""What settings of rotary positions mean that are left out, and which cannot be. Free of torch; the angles are in `rotary.py`."""

from __future__ import annotations

import math

from thinwire.config.sections import ModelConfig

FASTEST = {"llama3": 4.0, "yarn": 32.0}
"""Turns within the trained context from which on a frequency stays as it is, unless the model says."""


def attention_factor(model: ModelConfig) -> float:
    """Return what cosine and sine are multiplied by."""
    if model.rope_kind != "yarn":
        return 1.0
    return stretch_factor(model.rope_factor) if model.rope_attention_factor is None else model.rope_attention_factor


def stretch_factor(factor: float, scale: float = 1.0) -> float:
    """Return yarn's attention factor for positions stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def fastest_turns(model: ModelConfig) -> float:
    """Return the turns from which on a frequency stays as it is."""
    return FASTEST[model.rope_kind] if model.rope_fast is None else model.rope_fast


def trained_context(model: ModelConfig) -> int:
    """Return the sequence length that the unscaled frequencies were trained on."""
    return model.context if model.rope_context is None else model.rope_context


def check_rotary(model: ModelConfig) -> None:
    """Refuse rotary positions that cannot be: the value, the limit, the fix."""
    if model.head_size % 2:
        whole = f"model.width / model.heads = {model.width} / {model.heads} = " if model.head_dim is None else "model.head_dim "
        raise ValueError(f"the head size {whole}{model.head_size} is odd; rotary positions turn pairs: choose sizes that give an even one")
    if model.rope_kind == "dynamic" and model.head_size < 4:
        raise ValueError(f"model.rope_kind dynamic needs heads of at least 4, the head size is {model.head_size}; choose wider heads")
    if model.rope_kind in FASTEST and fastest_turns(model) <= model.rope_slow:
        raise ValueError(
            f"model.rope_fast is {fastest_turns(model)}, model.rope_slow {model.rope_slow}; fast ones make more turns: choose a larger "
            "--model.rope_fast"
        )
    if model.rope_kind == "yarn" and model.rope_theta <= 1:
        raise ValueError(f"model.rope_theta is {model.rope_theta}; yarn needs a base above 1, such as 10000")
