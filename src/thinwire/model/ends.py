"""What a stage and the ends of its boundaries know of each other: the context of a microbatch, shared parameters, figures.

A codec makes the ends (`codecs/base.py`); a stage calls them and asks the codec no more than `StageCodec` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from thinwire.model.cut import StagePlan
from thinwire.model.stream import Stream


@dataclass(frozen=True)
class Context:
    """What an end may know about the microbatch it works on."""

    step: int
    samples_B: Tensor
    """Global sample index of each row."""
    training: bool = True
    before_BT: Tensor | None = None
    """Ids that came before these, when text is written token by token."""
    rows: int | None = None
    """Rows of the whole batch where only some tokens count in the loss, and ids are marked (`bits/targets.py`)."""
    kept: dict[str, Tensor] = field(default_factory=dict, compare=False)
    """What a stage's entry keeps for its exit; on the first stage `embedded`, the tokens' embeddings."""


@runtime_checkable
class Measuring(Protocol):
    """An end, or a part of one, that measures something worth a line in the metrics."""

    def figures(self) -> dict[str, float]:
        """Return the figures of the step."""
        ...


@runtime_checkable
class Learning(Protocol):
    """An end, or a part of one, that both sides of a boundary have and that learns alike on both, without a word between them."""

    def commit(self) -> None:
        """Learn from the step that all have agreed on."""
        ...


class Shared(nn.Module):
    """A parameter that both sides of a boundary use: a submodule of the exit, which owns it, and of the entry, which holds a copy.

    At the steps for which the codec's `shares_after` is true the copy's gradient goes upstream, the owner updates with the sum, and its
    new value comes back: so both sides hold the same bits on any hardware. It takes no part in clipping by the global norm.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def update(self, gradient: Tensor, rate_factor: float) -> None:
        """Move the owner's weight, with the rate at this share of its peak; state belongs into persistent buffers."""
        raise NotImplementedError


class StageCodec(Protocol):
    """What a stage asks of the codec at its boundaries; `codecs/base.py` says what each is."""

    constrains: bool
    compute: torch.dtype

    @property
    def width(self) -> int: ...

    @property
    def sent_width(self) -> int: ...

    def at(self, layer: int) -> StageCodec: ...

    def stream(self, plan: StagePlan) -> Stream: ...

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]: ...
