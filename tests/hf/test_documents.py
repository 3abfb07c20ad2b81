"""Documents that share a window are, for the network, alone: against transformers with a block mask and positions that begin anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import TINY, gradients, make_pipeline, random_ids
from hf.families import in_fp64, make_config, make_model, our_stages, predict, random_tokens
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.hf.description import form_of
from thinwire.model.block import KVCache
from thinwire.model.documents import places_in_documents
from thinwire.model.ends import Context
from thinwire.model.llama.attention import visible
from thinwire.model.llama.window import window_of
from thinwire.pipeline.inprocess import Pipeline

pytest.importorskip("transformers")
SEPARATOR, TIME = 7, 24
CASES = {
    "llama": ("llama, grouped and wide heads, biases", "llama3"),
    "mistral": ("mistral", "linear"),
    "qwen2": ("qwen2, window above", "default"),
    "qwen3": ("qwen3, window by layer, biases", "yarn"),
}


def several() -> Tensor:
    """Return rows of documents: ends in the middle, at the beginning, at the end, twice, and a row without any."""
    ids = random_tokens(TIME + 1, 4).where(random_tokens(TIME + 1, 4) != SEPARATOR, 8)
    ids[0, [5, 11]] = SEPARATOR
    ids[1, [0, 14, 15]] = SEPARATOR
    ids[2, TIME - 1] = SEPARATOR
    return ids


def block_masks(ids_BT: Tensor, model: Any) -> Any:
    """Return masks for transformers, built the slow way."""
    batch, time = ids_BT.shape
    same = torch.zeros(batch, 1, time, time, dtype=torch.bool)
    for row in range(batch):
        number = torch.tensor([sum(int(each) == SEPARATOR for each in ids_BT[row, :place]) for place in range(time)])
        same[row, 0] = number[:, None] == number[None, :]
    masks = {window: same & visible(time, time, window, same.device) for window in {window_of(model, each) for each in range(model.layers)}}
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {"full_attention": masks[None], "sliding_attention": masks[model.window]}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_a_block_mask(tmp_path, name):
    family, rope = CASES[name]
    config = make_config(family, rope)
    make_model(config).save_pretrained(tmp_path)
    stages = our_stages(tmp_path, 3, "fp64")
    for stage in stages:
        stage.model = replace(stage.model, separator=SEPARATOR)
    model = stages[0].model
    codec = make_codec(codec_defaults("dense", dtype="fp64"), model, seed=0, compute=torch.float64)
    ids_BT1 = several()
    ids_BT = ids_BT1[:, :-1]
    ours = Pipeline(stages, codec, 2, TIME).step(ids_BT1, 0, 0)
    with in_fp64(config.model_type):
        theirs = make_model(make_config(family, rope), dtype=torch.float64)
        theirs.load_state_dict(make_model(config).state_dict())
        words = {"attention_mask": block_masks(ids_BT, model), "position_ids": places_in_documents(ids_BT, SEPARATOR)}
        logits = theirs(ids_BT, use_cache=False, **words).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT1[:, 1:].flatten())
        loss.backward()
    assert ours == pytest.approx(float(loss.detach()), rel=1e-11)
    found = gradients(Pipeline(stages, codec, 2, TIME))
    names = {entry.theirs: entry.ours for entry in form_of(model).tensors(model)}
    for each, parameter in theirs.named_parameters():
        expected, mine = parameter.grad, found[names[each]]
        assert float((mine - expected).norm()) <= 1e-9 * float(expected.norm()), each
    logits_ours = predict(stages, ids_BT)
    alone = predict(stages, ids_BT[:1, 6:12])
    assert torch.allclose(logits_ours[:1, 6:12], alone, rtol=0, atol=1e-11)


def test_text_behind_an_end_is_written_as_from_a_fresh_start(tmp_path):
    make_model(make_config("llama", "llama3")).save_pretrained(tmp_path)
    (stage,) = our_stages(tmp_path, 1, "fp64")
    stage.model = replace(stage.model, separator=SEPARATOR)
    ids, context = several()[:1], Context(0, torch.arange(1), training=False)
    expected = predict([stage], ids)
    cache, found, start = KVCache(), [], 0
    for count in (4, 3, 1, 6, 1, 1, 9):
        chunk = torch.nn.functional.pad(ids[:, start : start + count], (0, 2))  # as the last chunk of a prompt is filled up
        found.append(stage.read(chunk, (), context, cache, count)[0][:, :count])
        start += count
    assert start == ids.shape[1] and torch.allclose(torch.cat(found, dim=1), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("codec", ["dense", "subspace", "anchored", "quantize", "hadamard"])
def test_a_document_knows_nothing_of_the_one_before(codec):
    options: dict[str, dict[str, Any]] = {
        "subspace": {"rank": 8},
        "anchored": {"rank": 8, "ngrams": 3, "buckets": 64, "anchor_rank": 4},
        "quantize": {"bits": 8},
        "hadamard": {"bits": 4},
    }
    model = replace(TINY, separator=5)
    pipeline = make_pipeline(codec, model, stages=3, **options.get(codec, {}))
    for stage in pipeline.stages:  # rows of n-grams begin at zero, and would hide what they see
        for name, parameter in stage.named_parameters():
            if "ngrams" in name:
                torch.nn.init.normal_(parameter)
    ids = random_ids(model)
    ids[:, 4] = 5
    other = ids.clone()
    other[:, :4] = (other[:, :4] + 11) % 5
    first, second = (predict(pipeline.stages, each[:, :-1])[:, 5:] for each in (ids, other))
    assert torch.equal(first, second)
    stages = make_pipeline(codec, TINY, stages=3, **options.get(codec, {})).stages
    assert not torch.equal(*(predict(stages, each[:, :-1])[:, 5:] for each in (ids, other)))
