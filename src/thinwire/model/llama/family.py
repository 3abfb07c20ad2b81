"""What tells families of Llama-style decoders apart in Hugging Face folders. Each declares itself in a file of its own. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family: its names there, and the ingredients it has."""

    title: str
    model_type: str
    class_name: str
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What words mean that `config.json` does not have, where that is not an error."""
    attention_bias: tuple[Literal["none", "qkv", "all"], ...] = ("none",)
    """Which biases its attention can have; none and all: as the word `attention_bias` says."""
    ffn_bias: bool = False
    """Whether its FFN can have biases: as the word `mlp_bias` says."""
    qk_norm: Literal["none", "gains"] = "none"
    window: Literal["none", "every layer", "by layer"] = "none"
    """Which layers can have a sliding window."""


LLAMA = Family(
    title="Llama",
    model_type="llama",
    class_name="LlamaForCausalLM",
    absent={"max_position_embeddings": 2048},
    attention_bias=("none", "all"),
    ffn_bias=True,
)
