"""How a law says that it is broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from thinwire.config.sections import ModelConfig

CPU = torch.device("cpu")
TINY = ModelConfig(vocabulary=97, width=32, layers=4, heads=4, kv_heads=2, ffn=48, context=12)
"""A model of no size, for laws and tests."""
Options = dict[str, Any]
"""What a variant of a codec or an exchange sets besides its defaults."""


class BrokenLaw(AssertionError):
    """A codec or an exchange does not do what its seam promises."""


def demand(holds: object, text: str) -> None:
    """Raise BrokenLaw unless something holds; unlike `assert` it does so in optimized Python too."""
    if not holds:
        raise BrokenLaw(text)


def demand_refusal(call: Callable[[], object], pattern: str, text: str) -> None:
    """Raise BrokenLaw unless a call raises ValueError in such words."""
    try:
        call()
    except ValueError as error:
        demand(re.search(pattern, str(error)), f"{text}: refused without {pattern!r}: {error}")
        return
    raise BrokenLaw(f"{text}: not refused")
