"""How an architecture's networks are written as Hugging Face folders: names of tensors and `config.json`, both ways.

Folders, shards, tokenizers, projection and cards are `hf/`'s business, the same for all architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.config.sections import ModelConfig


@dataclass(frozen=True)
class PlainTensor:
    """One tensor of the plain network, the same under both names."""

    theirs: str
    ours: str | None
    """Global name of the parameter; None: always zero, because our network has no such bias."""
    shape: tuple[int, ...]


class HuggingFace:
    """The Hugging Face form of an architecture."""

    title: str
    """Its name for people, such as Llama."""
    model_type: str
    class_name: str
    """What `model_type` and `architectures` of `config.json` say."""
    head: str
    """Their name of the output head, which a folder with a tied head may hold too."""

    def tensors(self, model: ModelConfig) -> list[PlainTensor]:
        """List the tensors of the plain network, in the order in which they are written; each of our parameters is in it once."""
        raise NotImplementedError

    def to_json(self, model: ModelConfig, positions: int) -> dict[str, Any]:
        """Describe the network in the words of `config.json`; `positions` is the longest sequence it can read."""
        raise NotImplementedError

    def from_json(self, table: dict[str, Any], where: Path) -> ModelConfig:
        """Return the settings of the same network; raise ValueError, naming the file `where`, for one that this is not."""
        raise NotImplementedError

    def why_not(self, model: ModelConfig) -> str | None:
        """Say why no plain network computes what one with these settings does; None: one does."""
        return None

    def may_lack(self, name: str, table: dict[str, Any]) -> bool:
        """Tell whether a folder with this `config.json` may leave a tensor out, which is zero then."""
        return False

    def is_derived(self, name: str) -> bool:
        """Tell whether a tensor that a folder holds besides says nothing new, and is passed over."""
        return False

    def notes(self, table: dict[str, Any]) -> list[str]:
        """Say which settings of `config.json` concern training alone and are not taken over."""
        return []


def whole_number(table: dict[str, Any], name: str, where: Path, default: int | None = None) -> int:
    """Return a whole number of at least 1."""
    value: Any = default if table.get(name) is None else table[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}; it must be a whole number of at least 1: mend the file or download it again")
    return value


def real_number(table: dict[str, Any], name: str, where: Path, default: float | None = None) -> float:
    """Return a number above 0."""
    value: Any = default if table.get(name) is None else table[name]
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{where}: {name} is {value!r}; it must be a number above 0: mend the file or download it again")
    return float(value)
