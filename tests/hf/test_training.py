"""Twenty steps of ours are twenty steps of a plain loop over transformers and AdamW: in fp64 in process, in fp32 through three workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers import parameters
from hf.families import in_fp64, make_config, make_model, our_stages, random_tokens
from hf.support import bring_in, export
from runs import unhurried
from thinwire.cli import main as cli
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.sections import TrainConfig
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.data.open import open_data
from thinwire.hf.description import form_of
from thinwire.hf.foreign import open_foreign
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import Pipeline

transformers = pytest.importorskip("transformers")
STEPS, BATCH, TIME = 20, 4, 30
TRAIN = TrainConfig(optimizer="adamw", rate=2e-3, weight_decay=0.1, clip=0.0)
CASES = {
    "llama, tied": ("llama", "llama3", True),
    "llama with biases": ("llama, grouped and wide heads, biases", "yarn", False),
    "mistral": ("mistral", "linear", False),
    "qwen2": ("qwen2, window above", "dynamic", False),
    "qwen3, tied": ("qwen3", "default", True),
    "qwen3": ("qwen3, window by layer, biases", "yarn, all its words", False),
}
THROUGH_WORKERS = [
    "llama with biases",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("mistral", "qwen2", "qwen3", "qwen3, tied")),
]


def plain_loop(model: Any, batches: list[Tensor]) -> list[float]:
    """Train a model of transformers with AdamW, decay on matrices but the embedding; return the losses."""
    embedding = model.get_input_embeddings().weight
    decayed = [each for each in model.parameters() if each.dim() == 2 and each is not embedding]
    others = [each for each in model.parameters() if all(each is not other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": TRAIN.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=TRAIN.rate, betas=(TRAIN.beta1, TRAIN.beta2), eps=TRAIN.eps)
    losses = []
    for batch_BT1 in batches:
        logits = model(batch_BT1[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch_BT1[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def distances(ours: dict[str, Tensor], theirs: dict[str, Tensor], start: dict[str, Tensor]) -> dict[str, float]:
    """Return by name how far our weights are from theirs, as a share of what training changed."""
    return {name: float((ours[name] - theirs[name]).norm() / (theirs[name] - start[name]).norm()) for name in ours}


@pytest.mark.parametrize("name", CASES)
def test_in_fp64_the_weights_are_those_of_transformers(tmp_path, name):
    family, rope, tied = CASES[name]
    config = make_config(family, rope, tie_word_embeddings=tied)
    model = make_model(config)
    model.save_pretrained(tmp_path / "folder")
    stages = our_stages(tmp_path / "folder", 1 if tied else 3, "fp64")
    codec = make_codec(codec_defaults("dense", dtype="fp64"), stages[0].model, seed=0, compute=torch.float64)
    pipeline, optimizers = Pipeline(stages, codec, 2, TIME), [StageOptimizer(stage, TRAIN) for stage in stages]
    batches = [random_tokens(TIME + 1, BATCH, seed) for seed in range(STEPS)]
    losses = []
    for step, batch_BT1 in enumerate(batches):
        losses.append(pipeline.step(batch_BT1, step, step * BATCH))
        for optimizer in optimizers:
            optimizer.step(1.0, 1.0)
    with in_fp64(config.model_type):
        exact = make_model(make_config(family, rope, tie_word_embeddings=tied), dtype=torch.float64)
        exact.load_state_dict(model.state_dict())
        expected = plain_loop(exact, batches)
    assert losses == pytest.approx(expected, rel=1e-10) and losses[-1] != pytest.approx(losses[0], rel=1e-3)
    names = {entry.ours: entry.theirs for entry in form_of(stages[0].model).tensors(stages[0].model)}
    ours = {names[name]: value.detach() for name, value in parameters(pipeline).items()}
    assert max(distances(ours, exact.state_dict(), model.double().state_dict()).values()) < 1e-9


@pytest.mark.parametrize("name", THROUGH_WORKERS)
def test_through_three_workers_the_losses_are_those_of_transformers(settings_file, folder, tmp_path, name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    family, rope, tied = CASES[name]
    model = make_model(make_config(family, rope, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "folder")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "folder")
    words = ("--pipeline.stages", "3", "--pipeline.mode", "workers", "--codec.dtype", "fp32", "--model.context", str(TIME))
    words += ("--train.optimizer", "adamw", "--train.rate", str(TRAIN.rate), "--train.clip", "0", "--train.warmup", "0")
    run = bring_in(settings_file, tmp_path / "folder", tmp_path / "run", *words, "--train.decay", "0", "--train.steps", str(STEPS))
    with unhurried():
        assert cli.main(["train", "--run", str(run), "--resume"]) == 0
    config = read_config(run / CONFIG_FILE)
    data = open_data(config.data, config.model, config.seed).train
    batches = [torch.from_numpy(data.batch(step * BATCH, BATCH)).long() for step in range(STEPS)]
    plain = untied(model, tmp_path / "folder") if tied else model
    start = {key: value.clone() for key, value in plain.state_dict().items()}
    expected = plain_loop(plain, batches)
    lines = [json.loads(line) for line in (run / "metrics/stage-2.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "out"), dtype=torch.float32)
    assert not trained.config.tie_word_embeddings
    assert max(distances(trained.state_dict(), plain.state_dict(), start).values()) < 1e-3


def untied(model: Any, folder: Path) -> Any:
    """Return the same model with a head of its own."""
    assert open_foreign(folder).model.tied_head
    model.config.tie_word_embeddings = False
    other = make_model(model.config)
    other.load_state_dict(model.state_dict())
    assert (
        torch.equal(other.lm_head.weight, other.model.embed_tokens.weight) and other.lm_head.weight is not other.model.embed_tokens.weight
    )
    return other
