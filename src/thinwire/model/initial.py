"""Draw initial weights by name: every cut of a model, and every stage that asks for the same name, starts from the same numbers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

EMBEDDING_STD = 1.0
"""Unit size, so that a token's own features outweigh what the first branches write."""


def draw_normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers that depend on seed and name alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator)
