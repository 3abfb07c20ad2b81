"""Draw initial weights by name: every cut of a model, and every stage that asks for the same name, starts from the same numbers."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

EMBEDDING_STD = 1.0
"""Unit size, so that a token's own features outweigh what the first branches write."""


IN_PLACE = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
MADE = ("bernoulli", "multinomial", "normal", "rand", "randint", "randn", "randperm")


class OwnGenerator(TorchFunctionMode):
    """Let all that is drawn inside come from a generator of its own, whatever was drawn before.

    The generator that a process shares is left alone: torch holds its lock while it waits for the interpreter's, so two threads
    that build stages with it can wait for each other for ever.
    """

    draws = frozenset([getattr(Tensor, name) for name in IN_PLACE] + [getattr(torch, name) for name in MADE])

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Hand the generator to whatever draws; functions of torch.nn.init name the one they have, or None."""
        kwargs = dict(kwargs or {})
        if (function in self.draws or "generator" in kwargs) and kwargs.get("generator") is None:
            kwargs["generator"] = self.generator
        return function(*args, **kwargs)


def draw_normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers that depend on seed and name alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator)
