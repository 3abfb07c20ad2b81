"""Llama and its relatives as Hugging Face folders: every tensor under both names, and its shape as `config.json`, and back.

Matrices have the same layout on both sides ([out, in], rotary halves). Where Hugging Face has a bias on every matrix of a branch and ours
are on the output matrices alone (`model.output_bias`), the others are always zero. What our decoder cannot be is refused by its name there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.config.sections import ModelConfig
from thinwire.model.huggingface import HuggingFace, PlainTensor, real_number, whole_number
from thinwire.model.llama.family import Family
from thinwire.model.llama.rope_words import positions_of, rope_from_json, rope_to_json
from thinwire.model.llama.shapes import biased, gain_shapes, matrix_shapes
from thinwire.model.llama.window_words import windows_from_json, windows_to_json
from thinwire.model.names import EMBEDDING, HEAD, block_name

OF_A_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
NEEDED = {"hidden_act": "silu", "is_causal": True, "partial_rotary_factor": 1}
"""What our decoder is, in the words of `config.json`; a word that is absent or null there means the same."""


class DecoderForm(HuggingFace):
    """A plain Hugging Face model of a family."""

    head = "lm_head.weight"

    def __init__(self, family: Family) -> None:
        self.family = family
        self.title, self.model_type, self.class_name = family.title, family.model_type, family.class_name

    def tensors(self, model: ModelConfig) -> list[PlainTensor]:
        entries = [PlainTensor("model.embed_tokens.weight", EMBEDDING, (model.vocabulary, model.width))]
        for layer in range(model.layers):
            entries += self._of_layer(model, layer)
        entries.append(PlainTensor("model.norm.weight", "norm.weight", (model.width,)))
        if not model.tied_head:
            entries.append(PlainTensor(self.head, HEAD, (model.vocabulary, model.width)))
        return entries

    def _of_layer(self, model: ModelConfig, layer: int) -> Iterator[PlainTensor]:
        matrices, gains, ours_biased = matrix_shapes(model), gain_shapes(model), biased(model)
        words = self._bias_words(model)
        for ours, theirs in OF_A_LAYER.items():
            theirs, named = f"model.layers.{layer}.{theirs}", block_name(layer, ours)
            if ours in gains:
                yield PlainTensor(f"{theirs}.weight", f"{named}.weight", gains[ours])
            if ours not in matrices:
                continue
            yield PlainTensor(f"{theirs}.weight", f"{named}.weight", matrices[ours])
            every = words.get("attention_bias" if ours.startswith("attention.") else "mlp_bias", False)
            if every or ours_biased[ours]:
                yield PlainTensor(f"{theirs}.bias", f"{named}.bias" if ours_biased[ours] else None, matrices[ours][:1])

    def _bias_words(self, model: ModelConfig) -> dict[str, bool]:
        """Say which of their words for biases on every matrix of a branch are true, of those that the family has."""
        found = biased(model)
        attention, ffn = (any(has for name, has in found.items() if name.startswith(part)) for part in ("attention.", "ffn."))
        words = {"attention_bias": attention} if "all" in self.family.attention_bias else {}
        return words | ({"mlp_bias": ffn} if self.family.ffn_bias else {})

    def to_json(self, model: ModelConfig, positions: int) -> dict[str, Any]:
        words = self._bias_words(model)
        return {
            "vocab_size": model.vocabulary,
            "hidden_size": model.width,
            "intermediate_size": model.ffn,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": positions_of(model, positions),
            "rms_norm_eps": model.norm_eps,
            **rope_to_json(model),
            **({"attention_bias": words["attention_bias"]} if "attention_bias" in words else {}),
            "attention_dropout": 0.0,
            **({"mlp_bias": words["mlp_bias"]} if "mlp_bias" in words else {}),
            **windows_to_json(model, self.family),
            "tie_word_embeddings": model.tied_head,
            "use_cache": True,
        }

    def from_json(self, table: dict[str, Any], where: Path) -> ModelConfig:
        table, family = {**self.family.absent, **table}, self.family
        for name, allowed in NEEDED.items():
            if table.get(name, allowed) not in (allowed, None):
                limits = f"it can hold plain {self.title} models alone: choose another folder, or convert this one"
                raise ValueError(f"{where}: {name} is {table[name]!r}, our decoder has {allowed!r}; {limits}")
        heads, width = whole_number(table, "num_attention_heads", where), whole_number(table, "hidden_size", where)
        head_size, layers = whole_number(table, "head_dim", where, width // heads), whole_number(table, "num_hidden_layers", where)
        context = whole_number(table, "max_position_embeddings", where, family.absent["max_position_embeddings"])
        everywhere = len(family.attention_bias) > 1 and bool(table.get("attention_bias"))
        return ModelConfig(
            vocabulary=whole_number(table, "vocab_size", where),
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=whole_number(table, "num_key_value_heads", where, heads),
            head_dim=None if head_size * heads == width else head_size,
            ffn=whole_number(table, "intermediate_size", where),
            context=context,
            norm_eps=real_number(table, "rms_norm_eps", where, 1e-6),
            qk_norm=family.qk_norm,
            attention_bias="all" if everywhere else family.attention_bias[0],
            ffn_bias=family.ffn_bias and bool(table.get("mlp_bias")),
            tied_head=bool(table.get("tie_word_embeddings")),
            **rope_from_json(table, where, context),
            **windows_from_json(table, where, family, layers),
        )

    def why_not(self, model: ModelConfig) -> str | None:
        family, title = self.family, self.title
        unknown = {
            "branch_norm_gains": "puts a norm with gains behind each branch",
            "norm_reorder": "puts the norms behind the branches",
            "logit_cap": "caps the logits",
        }
        for name, effect in unknown.items():
            if getattr(model, name):
                return f"model.{name} {effect}, which {title} does not have"
        if model.ffn_kind != "swiglu":
            return f"model.ffn_kind is {model.ffn_kind}, and the FFN of {title} is swiglu"
        if model.qk_norm != family.qk_norm:
            return f"model.qk_norm is {model.qk_norm}, and {title} has {family.qk_norm}"
        if model.window is not None and (family.window == "none" or (family.window == "every layer" and model.window_layers is not None)):
            return f"model.window is {model.window} in some layers, and {title} has a window in {family.window.replace('none', 'no layer')}"
        return self._why_not_biases(model)

    def _why_not_biases(self, model: ModelConfig) -> str | None:
        """Say which biases the family does not have; where it has them on every matrix of a branch, those we lack are zero."""
        known = self.family.attention_bias
        if "all" not in known and (model.attention_bias not in known or model.output_bias):
            return f"biases of attention are {model.attention_bias}{' and on outputs' * model.output_bias}, and {self.title} has {known[0]}"
        if not self.family.ffn_bias and (model.ffn_bias or model.output_bias):
            return f"model.{'ffn_bias' if model.ffn_bias else 'output_bias'} puts biases into the FFN, and {self.title} has none there"
        return None

    def is_derived(self, name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq")  # written by old versions; it follows from the rotary settings

    def notes(self, table: dict[str, Any]) -> list[str]:
        rate = table.get("attention_dropout")
        if not rate:
            return []
        return [
            f"note: attention_dropout {rate} of config.json is not taken over: our attention drops none of its weights, so the run trains "
            "without it. The network is the same; to train with dropout inside each branch instead, add --model.dropout RATE"
        ]
