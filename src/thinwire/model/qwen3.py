"""Qwen3, the dense ones: a Llama with heads of a width of their own and a norm with gains on each head's queries and keys."""

from __future__ import annotations

from thinwire.model.llama.architecture import Decoder
from thinwire.model.llama.family import Family
from thinwire.model.qwen2 import WINDOWS

QWEN3 = Family(
    title="Qwen3",
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    absent={"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128, **WINDOWS},
    attention_bias=("none", "all"),
    qk_norm="gains",
    window="by layer",
)


def make_qwen3() -> Decoder:
    """Make the architecture."""
    return Decoder(QWEN3)
