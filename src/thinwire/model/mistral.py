"""Mistral: a Llama without biases; `sliding_window` of its config.json, where it is a number, holds for every layer."""

from __future__ import annotations

from thinwire.model.llama.architecture import Decoder
from thinwire.model.llama.family import Family

MISTRAL = Family(
    title="Mistral",
    model_type="mistral",
    class_name="MistralForCausalLM",
    absent={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    window="every layer",
)


def make_mistral() -> Decoder:
    """Make the architecture."""
    return Decoder(MISTRAL)
