"""The decoder against an independent one: Hugging Face's Llama."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY, make_pipeline, random_ids
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stages

HF_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    if name in HF_NAMES:
        return HF_NAMES[name]
    _, layer, rest = name.split(".", 2)
    part, _, ending = rest.rpartition(".")
    return f"model.layers.{layer}.{HF_NAMES[part]}.{ending}"


def test_loss_equals_hugging_face_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TINY.vocabulary,
        hidden_size=TINY.width,
        intermediate_size=TINY.ffn,
        num_hidden_layers=TINY.layers,
        num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads,
        max_position_embeddings=TINY.context,
        rms_norm_eps=TINY.norm_eps,
        rope_theta=TINY.rope_theta,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    theirs = LlamaForCausalLM(config).double()
    ours = make_pipeline("dense", stages=2)
    state = {hf_name(name): value.detach() for stage in ours.stages for name, value in stage.named_parameters()}
    theirs.load_state_dict(state, strict=True)
    ids = random_ids()
    logits = theirs(input_ids=ids[:, :-1]).logits.detach()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    # Their rotary table is float32, ours float64.
    assert ours.evaluate(ids) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("codec", ["dense", "subspace"])
def test_initial_weights_and_names_do_not_depend_on_the_cut(codec):
    whole = make_pipeline(codec, stages=1)
    built = build_stages(TINY, cut_layers(4, 4), whole.codec, 3)
    if codec == "subspace":
        whole = make_pipeline(codec, stages=2, split="3,1")
    first = {name: value for stage in whole.stages for name, value in stage.named_parameters()}
    second = {name: value for stage in built for name, value in stage.named_parameters()}
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
