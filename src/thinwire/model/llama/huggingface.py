"""Llama as a Hugging Face folder: every tensor under both names, and its shape as `config.json`, and back.

Matrices have the same layout on both sides ([out, in], rotary halves). With biases Hugging Face puts one on every matrix of a branch; ours
are on the output matrices alone, so the others are always zero. What our decoder cannot be is refused by its name there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.config.sections import ModelConfig
from thinwire.model.huggingface import HuggingFace, PlainTensor, real_number, whole_number
from thinwire.model.names import EMBEDDING, HEAD, block_name

OF_A_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
WITH_BIAS = ("attention.output", "ffn.down")
"""Matrices that have a bias with `model.output_bias`."""
NEEDED = {"hidden_act": "silu", "is_causal": True, "partial_rotary_factor": 1, "quantization_config": None}
"""What our decoder is, in the words of `config.json`; a word that is absent or null there means the same."""
LIMITS = "it can hold plain Llama models alone: choose another folder, or convert this one"


class LlamaForm(HuggingFace):
    """A plain Hugging Face Llama."""

    title, model_type, class_name, head = "Llama", "llama", "LlamaForCausalLM", "lm_head.weight"

    def tensors(self, model: ModelConfig) -> list[PlainTensor]:
        entries = [PlainTensor("model.embed_tokens.weight", EMBEDDING, (model.vocabulary, model.width))]
        for layer in range(model.layers):
            entries += of_layer(model, layer)
        entries.append(PlainTensor("model.norm.weight", "norm.weight", (model.width,)))
        if not model.tied_head:
            entries.append(PlainTensor(self.head, HEAD, (model.vocabulary, model.width)))
        return entries

    def to_json(self, model: ModelConfig, positions: int) -> dict[str, Any]:
        return {
            "vocab_size": model.vocabulary,
            "hidden_size": model.width,
            "intermediate_size": model.ffn,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": positions,
            "rms_norm_eps": model.norm_eps,
            # One for transformers 5, the other for transformers 4: each passes over what it does not know.
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
            "rope_theta": model.rope_theta,
            "attention_bias": model.output_bias,
            "attention_dropout": 0.0,
            "mlp_bias": model.output_bias,
            "tie_word_embeddings": model.tied_head,
            "use_cache": True,
        }

    def from_json(self, table: dict[str, Any], where: Path) -> ModelConfig:
        for name, allowed in NEEDED.items():
            if table.get(name, allowed) not in (allowed, None):
                raise ValueError(f"{where}: {name} is {table[name]!r}, our decoder has {allowed!r}; {LIMITS}")
        heads = whole_number(table, "num_attention_heads", where)
        width = whole_number(table, "hidden_size", where)
        head_size = whole_number(table, "head_dim", where, width // max(1, heads))
        if head_size * heads != width:
            raise ValueError(
                f"{where}: head_dim is {head_size}, but hidden_size / num_attention_heads is {width} / {heads}; our attention is as wide "
                "as the model: choose a model whose heads divide its width"
            )
        return ModelConfig(
            vocabulary=whole_number(table, "vocab_size", where),
            width=width,
            layers=whole_number(table, "num_hidden_layers", where),
            heads=heads,
            kv_heads=whole_number(table, "num_key_value_heads", where, heads),
            ffn=whole_number(table, "intermediate_size", where),
            context=whole_number(table, "max_position_embeddings", where, 2048),
            rope_theta=rotary_base(table, where),
            norm_eps=real_number(table, "rms_norm_eps", where, 1e-6),
            output_bias=bool(table.get("attention_bias") or table.get("mlp_bias")),
            tied_head=bool(table.get("tie_word_embeddings")),
        )

    def why_not(self, model: ModelConfig) -> str | None:
        if model.branch_norm_gains:
            return "model.branch_norm_gains puts a norm with gains behind each branch, which Llama does not have"
        return None

    def may_lack(self, name: str, table: dict[str, Any]) -> bool:
        absent = [part for part, word in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")) if not table.get(word)]
        return name.endswith(".bias") and name.split(".")[3] in absent

    def is_derived(self, name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq")  # written by old versions; it follows from rope_theta

    def notes(self, table: dict[str, Any]) -> list[str]:
        rate = table.get("attention_dropout")
        if not rate:
            return []
        return [
            f"note: attention_dropout {rate} of config.json is not taken over: our attention drops none of its weights, so the run trains "
            "without it. The network is the same; to train with dropout inside each branch instead, add --model.dropout RATE"
        ]


def of_layer(model: ModelConfig, layer: int) -> Iterator[PlainTensor]:
    """List the tensors of one layer."""
    width, keys = model.width, model.kv_heads * model.head_size
    outputs = {"attention.key": keys, "attention.value": keys, "ffn.gate": model.ffn, "ffn.up": model.ffn}
    for ours, theirs in OF_A_LAYER.items():
        theirs, named = f"model.layers.{layer}.{theirs}", block_name(layer, ours)
        if ours.endswith("norm"):
            yield PlainTensor(f"{theirs}.weight", f"{named}.weight", (width,))
            continue
        rows = outputs.get(ours, width)
        yield PlainTensor(f"{theirs}.weight", f"{named}.weight", (rows, model.ffn if ours == "ffn.down" else width))
        if model.output_bias:
            yield PlainTensor(f"{theirs}.bias", f"{named}.bias" if ours in WITH_BIAS else None, (rows,))


def rotary_base(table: dict[str, Any], where: Path) -> float:
    """Return the base of the rotary frequencies; scaled ones are refused."""
    base = table.get("rope_theta", 10_000.0)
    for name in ("rope_parameters", "rope_scaling"):
        part = table.get(name) or {}
        if not isinstance(part, dict):
            raise ValueError(f"{where}: {name} is {part!r}; it must be an object such as {{'rope_type': 'default'}}")
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default" or part.get("partial_rotary_factor", 1) != 1:
            raise ValueError(
                f"{where}: {name} is {part!r}; our rotary positions are of the kind 'default': choose a model without rope scaling, such "
                "as the one this was extended from"
            )
        base = part.get("rope_theta", base)
    return real_number({"rope_theta": base}, "rope_theta", where)
