"""Text written token by token from a KV cache is that of transformers: with sliding windows, and past the trained length."""

from __future__ import annotations

import pytest
import torch

from hf.families import make_config, make_model, our_stages, random_tokens
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.pipeline.decode import Writer

transformers = pytest.importorskip("transformers")
CASES = [("mistral", "default"), ("qwen2, window above", "yarn"), ("qwen3, window by layer, biases", "llama3"), ("llama", "dynamic")]
NEW = 40


@pytest.mark.parametrize("prompt", [10, 30, 64])
@pytest.mark.parametrize("family, rope", CASES)
def test_greedy_text_is_that_of_transformers(tmp_path, family, rope, prompt):
    model = make_model(make_config(family, rope))
    model.save_pretrained(tmp_path / "folder")
    stages, ids_BT = our_stages(tmp_path / "folder"), random_tokens(prompt, 1)
    codec = make_codec(codec_defaults("dense", dtype="fp32"), stages[0].model, seed=0)
    with torch.no_grad():
        kept = model.generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    ours = list(Writer(stages, codec, 0, "fp32").write(ids_BT[0].tolist(), NEW, None, lambda logits_V: int(logits_V.argmax())))
    assert ours == kept[0, prompt:].tolist() and len(set(ours)) > 5
