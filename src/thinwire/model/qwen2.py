"""Qwen2, and 2.5: a Llama with biases on queries, keys and values; its upper layers may have a sliding window."""

from __future__ import annotations

from thinwire.model.llama.architecture import Decoder
from thinwire.model.llama.family import Family

WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
"""What the words mean that are absent, of Qwen3 too."""
QWEN2 = Family(
    title="Qwen2",
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    absent={"max_position_embeddings": 32_768, "num_key_value_heads": 32, **WINDOWS},
    attention_bias=("qkv",),
    window="by layer",
)


def make_qwen2() -> Decoder:
    """Make the architecture."""
    return Decoder(QWEN2)
