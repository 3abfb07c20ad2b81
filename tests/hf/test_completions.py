"""Fine-tuning on answers: losses and weights are those of transformers with labels of -100, whatever the microbatches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from data.conversations import talks, write_rows, write_tokenizer
from helpers import parameters
from hf.families import in_fp64, make_config, make_model, our_stages, random_tokens
from hf.support import bring_in
from hf.test_training import TRAIN, distances
from runs import unhurried
from thinwire.bits.targets import add_number, count_targets, mark_ids
from thinwire.cli import main as cli
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.data.open import open_data
from thinwire.hf.description import form_of
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import Pipeline

pytest.importorskip("transformers")
STEPS, BATCH, TIME = 20, 4, 30


def marked_batch(seed: int) -> Tensor:
    """Return rows of which very different numbers of tokens count."""
    ids = random_tokens(TIME + 1, BATCH, seed).numpy()
    chance = np.random.default_rng(seed).random((BATCH, TIME + 1))
    marked = mark_ids(ids, chance < np.array([[0.05], [0.9], [0.3], [0.1]]))
    marked[:, 3] = ids[:, 3]
    return torch.from_numpy(add_number(marked, count_targets(marked)))


def labelled(marked_BT2: Tensor) -> dict[str, Tensor]:
    """Return ids and labels as transformers want them."""
    marked = marked_BT2[:, :-1].long()
    return {"input_ids": torch.where(marked < 0, ~marked, marked), "labels": marked.masked_fill(marked < 0, -100)}


def their_loss(model: Any, marked: Tensor) -> Tensor:
    """Return the loss of transformers; in fp64 as they define it, for they round logits to fp32."""
    words = labelled(marked)
    if model.dtype != torch.float64:
        return model(**words).loss
    logits = model(words["input_ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), words["labels"][:, 1:].flatten(), ignore_index=-100)


def plain_loop(model: Any, batches: list[Tensor]) -> list[float]:
    """Train a model of transformers with AdamW on what counts; return the losses."""
    embedding, losses = model.get_input_embeddings().weight, []
    decayed = [each for each in model.parameters() if each.dim() == 2 and each is not embedding]
    others = [each for each in model.parameters() if all(each is not other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": TRAIN.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=TRAIN.rate, betas=(TRAIN.beta1, TRAIN.beta2), eps=TRAIN.eps)
    for marked in batches:
        loss = their_loss(model, marked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_in_fp64_the_weights_are_those_of_transformers(tmp_path, microbatch):
    config = make_config("qwen3", "default")
    model = make_model(config)
    model.save_pretrained(tmp_path)
    stages = our_stages(tmp_path, 3, "fp64")
    codec = make_codec(codec_defaults("dense", dtype="fp64"), stages[0].model, seed=0, compute=torch.float64)
    pipeline = Pipeline(stages, codec, microbatch, TIME, marked=True)
    optimizers, batches = [StageOptimizer(stage, TRAIN) for stage in stages], [marked_batch(seed) for seed in range(STEPS)]
    losses = []
    for step, batch in enumerate(batches):
        losses.append(pipeline.step(batch, step, step * BATCH))
        for optimizer in optimizers:
            optimizer.step(1.0, 1.0)
    with in_fp64(config.model_type):
        exact = make_model(make_config("qwen3", "default"), dtype=torch.float64)
        exact.load_state_dict(model.state_dict())
        expected = plain_loop(exact, batches)
    assert losses == pytest.approx(expected, rel=1e-10)
    names = {entry.ours: entry.theirs for entry in form_of(stages[0].model).tensors(stages[0].model)}
    ours = {names[name]: value.detach() for name, value in parameters(pipeline).items()}
    assert max(distances(ours, exact.state_dict(), model.double().state_dict()).values()) < 1e-9


def fine_tune(settings_file: str, folder: Path, run: Path, *words: str) -> tuple[list[float], dict[str, Any]]:
    """Import a folder, learn answers with three workers; return the losses and the summary."""
    chosen = ("--pipeline.stages", "3", "--pipeline.mode", "workers", "--codec.dtype", "fp32", "--model.context", "120")
    chosen += ("--train.optimizer", "adamw", "--train.rate", str(TRAIN.rate), "--train.clip", "0", "--train.warmup", "0")
    chosen += ("--train.decay", "0", "--train.steps", "6", "--data.source", str(folder / "rows.jsonl"), "--data.loss", "completions")
    bring_in(settings_file, folder, run, *chosen, *words)
    with unhurried():
        assert cli.main(["train", "--run", str(run), "--resume"]) == 0
    last = max(run.glob("metrics/stage-*.jsonl"))
    return [json.loads(line)["loss"] for line in last.read_text().splitlines()], json.loads((run / "summary.json").read_text())


def test_through_workers_the_losses_are_those_of_transformers(settings_file, tmp_path):
    model = make_model(make_config("llama"))
    model.save_pretrained(tmp_path / "folder")
    shutil.copytree(write_tokenizer(tmp_path / "tokenizer"), tmp_path / "folder", dirs_exist_ok=True)
    write_rows(tmp_path / "folder" / "rows.jsonl", talks())
    losses, summary = fine_tune(settings_file, tmp_path / "folder", tmp_path / "run", "--pipeline.microbatches", "2")
    config = read_config(tmp_path / "run" / CONFIG_FILE)
    data = open_data(config.data, config.model, config.seed)
    batches = [torch.from_numpy(data.train.batch(step * config.train.batch, config.train.batch)) for step in range(6)]
    counts = [count_targets(batch[start : start + 2, :-1].numpy()) for batch in batches for start in (0, 2)]
    assert len(set(counts)) > 4  # microbatches differ in what counts
    expected = plain_loop(model, batches)
    assert losses == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]
    marks = summary["bytes_per_token_ids"] - 2 * 121 / 120
    assert 0.125 <= marks <= 0.2
