"""Rotary positions: angles of every kind that Hugging Face names, in fp64.

`dynamic` depends on the length of the sequence that is read: `rotary_tables` takes it from the end of the positions asked for, so a
sequence that is read as a whole is turned by its own length, as in transformers. Text that is written token by token is turned by the
length there is when a token is read, and its key stays as it was: so do transformers behind a prompt.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.config.sections import ModelConfig
from thinwire.model.llama.rope import attention_factor, fastest_turns, trained_context


def rotary_tables(model: ModelConfig, positions: range) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles, [T, S], the two halves of S alike (Hugging Face's layout)."""
    angles = torch.outer(torch.arange(positions.start, positions.stop, dtype=torch.float64), frequencies(model, positions.stop))
    angles_TS = torch.cat((angles, angles), dim=-1)
    scale = attention_factor(model)
    return (angles_TS.cos(), angles_TS.sin()) if scale == 1 else (angles_TS.cos() * scale, angles_TS.sin() * scale)


def frequencies(model: ModelConfig, length: int) -> Tensor:
    """Return the angles per position of a sequence of this length, [S / 2]."""
    half, kind = torch.arange(0, model.head_size, 2, dtype=torch.float64) / model.head_size, model.rope_kind
    if kind == "dynamic":
        return dynamic_base(model, length) ** -half
    plain = model.rope_theta**-half
    if kind == "linear":
        return plain / model.rope_factor
    if kind == "default":
        return plain
    kept = kept_by_turns(model, plain) if kind == "llama3" else kept_by_index(model)
    return plain * kept + plain / model.rope_factor * (1 - kept)


def dynamic_base(model: ModelConfig, length: int) -> float:
    """Return the base for a sequence of this length: beyond the trained context it grows with it (NTK)."""
    stretched = model.rope_factor * max(1.0, length / trained_context(model)) - (model.rope_factor - 1)
    return model.rope_theta * stretched ** (model.head_size / (model.head_size - 2))


def kept_by_turns(model: ModelConfig, plain: Tensor) -> Tensor:
    """Return the share of each frequency that stays, by its turns within the trained context (llama3)."""
    turns = trained_context(model) * plain / (2 * math.pi)
    return ((turns - model.rope_slow) / (fastest_turns(model) - model.rope_slow)).clamp(0, 1)


def kept_by_index(model: ModelConfig) -> Tensor:
    """Return the share of each frequency that stays, by a ramp over their numbers from fast to slow (yarn)."""
    low, high = (index_of(model, turns) for turns in (fastest_turns(model), model.rope_slow))
    if model.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, model.head_size - 1)
    ramp = (torch.arange(model.head_size // 2, dtype=torch.float64) - low) / (high - low if high != low else 0.001)
    return 1 - ramp.clamp(0, 1)


def index_of(model: ModelConfig, turns: float) -> float:
    """Return the number, not whole, of the frequency that makes so many turns within the trained context."""
    return model.head_size * math.log(trained_context(model) / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))
