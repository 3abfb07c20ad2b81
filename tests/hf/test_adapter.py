"""LoRA beside peft and transformers: twenty steps, both file formats, and base plus adapter as one network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from hf.families import in_fp64, make_config, make_model, random_tokens
from hf.support import bring_in, export, our_logits, some_ids
from runs import unhurried
from thinwire.cli import main as cli
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.data.open import open_data
from thinwire.hf.adapter import adapter_names
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline.inprocess import Pipeline, build_pipeline
from thinwire.run.saved import load_here

transformers = pytest.importorskip("transformers")
STEPS, BATCH, TIME, RATE, DECAY = 20, 4, 30, 2e-3, 0.1
ADAPTER = ("--adapter.rank", "3", "--adapter.alpha", "12", "--adapter.targets", "q_proj,v_proj,down_proj")
OPTIMIZER = ("--train.optimizer", "adamw", "--train.rate", str(RATE), "--train.clip", "0", "--train.warmup", "0", "--train.decay", "0")
WORDS = (*OPTIMIZER, "--train.steps", str(STEPS), "--model.context", str(TIME), "--codec.name", "dense")


def base_folder(folder: Path, tokens: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Write a random model of a family with a tokenizer; return the model."""
    from transformers import AutoTokenizer

    model = make_model(make_config(family, "default", **changes)).to(dtype)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokens).save_pretrained(folder)
    return model


def peft_loop(model: Any, batches: list[Tensor]) -> list[float]:
    """Train the adapter of a peft model with AdamW; return the losses."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    losses = []
    for batch_BT1 in batches:
        logits = model(batch_BT1[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch_BT1[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_name(model: Any) -> dict[str, Tensor]:
    """Return the matrices of a peft model's adapter by the names in its file."""
    return {name.replace(".default", ""): each.detach() for name, each in model.named_parameters() if "lora_" in name}


def loaded_pipeline(run: Path) -> Pipeline:
    """Build the pipeline of a run and load its newest checkpoint."""
    pipeline = build_pipeline(read_config(run / CONFIG_FILE), torch.device("cpu"))
    load_here(run, pipeline.stages)
    return pipeline


@pytest.mark.parametrize("family", ["llama, grouped and wide heads, biases", "qwen3"])
def test_in_fp64_twenty_steps_are_those_of_peft(settings_file, folder, tmp_path, family):
    peft = pytest.importorskip("peft")
    model = base_folder(tmp_path / "folder", folder, family)
    wide = ("--train.dtype", "fp64", "--codec.dtype", "fp64")
    run = bring_in(settings_file, tmp_path / "folder", tmp_path / "run", *WORDS, *ADAPTER, *wide, "--pipeline.stages", "3")
    start = export(run, tmp_path / "start", "--adapter")
    pipeline, config = loaded_pipeline(run), read_config(run / CONFIG_FILE)
    optimizers = [StageOptimizer(stage, config.train) for stage in pipeline.stages]
    batches, losses = [random_tokens(TIME + 1, BATCH, seed) for seed in range(STEPS)], []
    for step, batch_BT1 in enumerate(batches):
        losses.append(pipeline.step(batch_BT1, step, step * BATCH))
        for optimizer in optimizers:
            optimizer.step(1.0, 1.0)
    with in_fp64(model.config.model_type):
        exact = make_model(make_config(family), dtype=torch.float64)
        exact.load_state_dict(model.state_dict())
        adapted = peft.PeftModel.from_pretrained(exact, start, is_trainable=True, autocast_adapter_dtype=False)
        before = {name: each.clone() for name, each in by_name(adapted).items()}
        expected = peft_loop(adapted, batches)
    assert losses == pytest.approx(expected, rel=1e-10) and losses[-1] != pytest.approx(losses[0], rel=1e-3)
    ours = {name: each.detach() for stage in pipeline.stages for name, each in stage.trained().items()}
    assert len(ours) == 3 * 3 * 2 == len(before)
    assert all(each.grad is None for stage in pipeline.stages for name, each in stage.named_parameters() if name in stage.frozen)
    names = adapter_names(config.model, config.adapter)
    for name, value in by_name(adapted).items():
        assert float((ours[names[name]] - value).norm() / (value - before[name]).norm()) < 1e-9, name


def test_through_three_workers_the_losses_are_those_of_peft_and_the_exports_open(settings_file, folder, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base_folder(tmp_path / "folder", folder, "llama", torch.bfloat16)
    words = ("--pipeline.stages", "3", "--pipeline.mode", "workers", "--codec.dtype", "fp32", *WORDS, *ADAPTER)
    run = bring_in(settings_file, tmp_path / "folder", tmp_path / "run", *words)
    assert read_config(run / CONFIG_FILE).adapter.base_format == "bf16"
    start = export(run, tmp_path / "start", "--adapter")
    with unhurried():
        assert cli.main(["train", "--run", str(run), "--resume"]) == 0
    config = read_config(run / CONFIG_FILE)
    data = open_data(config.data, config.model, config.seed).train
    batches = [torch.from_numpy(data.batch(step * BATCH, BATCH)).long() for step in range(STEPS)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, start, is_trainable=True)
    before = {name: each.clone() for name, each in by_name(adapted).items()}
    expected = peft_loop(adapted, batches)
    lines = [json.loads(line) for line in (run / "metrics/stage-2.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-5)
    ours = load_file(export(run, tmp_path / "adapter", "--adapter") / "adapter_model.safetensors")
    for name, value in by_name(adapted).items():
        assert float((ours[name] - value).norm() / (value - before[name]).norm()) < 1e-3, name
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload().state_dict()
    whole = load_file(export(run, tmp_path / "whole", "--dtype", "fp32") / "model.safetensors")
    assert whole.keys() == merged.keys()
    assert all(torch.allclose(whole[name], merged[name], rtol=1e-6, atol=1e-7) for name in whole)
    held = json.loads((run / "summary.json").read_text())["memory"]
    assert all(stage["base"] > 5 * stage["parameters"] and stage["gradients"] == stage["parameters"] for stage in held)
    assert all(stage["optimizer"] < 2.1 * stage["parameters"] for stage in held)


def start_run(settings_file, folder, tmp_path, *words: str) -> Path:
    """Import a folder as an adapter run of two stages in one process."""
    common = ("--pipeline.stages", "2", "--train.steps", "4", "--train.checkpoint_every", "2", "--train.decay", "0", *ADAPTER)
    return bring_in(settings_file, folder, tmp_path, "--codec.name", "dense", *common, *words)


def go_on(run: Path, *words: str) -> dict:
    with unhurried():
        assert cli.main(["train", "--run", str(run), "--resume", *words]) == 0
    return json.loads((run / "summary.json").read_text())


def test_checkpoints_hold_the_adapter_alone_and_name_the_base(settings_file, folder, tmp_path, capsys):
    run = start_run(settings_file, folder, tmp_path / "run")
    base, digest = run / "checkpoints/base", read_config(run / CONFIG_FILE).adapter.base
    stood = {path.name: path.read_bytes() for path in base.iterdir()}
    summary = go_on(run)
    newest = run / "checkpoints/step-000004"
    names = load_file(newest / "stage-0.safetensors").keys()
    assert names and all(".lora_" in name for name in names)
    assert json.loads((newest / "stage-1.json").read_text())["base"] == digest and len(digest) == 64
    assert {path.name: path.read_bytes() for path in base.iterdir()} == stood
    assert summary["trainable_parameters"] == sum(
        each.numel() for index in (0, 1) for name, each in load_file(newest / f"stage-{index}.safetensors").items() if "/" not in name
    )
    other = start_run(settings_file, folder, tmp_path / "other", "--pipeline.stages", "4")
    assert (
        go_on(other)["model_sha256"]
        == go_on(start_run(settings_file, folder, tmp_path / "third"), "--pipeline.stages", "4")["model_sha256"]
    )
    (base / "stage-1.safetensors").write_bytes(stood["stage-1.safetensors"][:-1] + b"!")
    assert cli.main(["train", "--run", str(run), "--resume", "--train.steps", "6"]) != 0
    told = capsys.readouterr().err
    assert "base/stage-1.safetensors does not match" in told and "copy checkpoints/base from a machine that has it" in told


def test_within_a_memory_budget_the_bits_are_the_same(settings_file, folder, tmp_path):
    plain, small = (start_run(settings_file, folder, tmp_path / name) for name in ("plain", "small"))
    found = go_on(small, "--memory.budget", "6MB")
    assert found["model_sha256"] == go_on(plain)["model_sha256"]
    for stage in found["memory"]:
        assert stage["base"] > 5 * stage["parameters"] and stage["gradients"] == stage["parameters"] and stage["peak"] <= stage["budget"]


@pytest.mark.parametrize(
    "words", [(), ("--adapter.base_format", "int8"), ("--adapter.dropout", "0.2", "--train.dtype", "bf16"), ("--codec.name", "hadamard")]
)
def test_a_resume_and_a_fork_give_the_bits_of_an_undisturbed_run(settings_file, folder, tmp_path, words):
    whole = go_on(start_run(settings_file, folder, tmp_path / "whole", *words))
    halves = start_run(settings_file, folder, tmp_path / "halves", *words)
    assert go_on(halves, "--train.steps", "2")["model_sha256"] != whole["model_sha256"]
    assert cli.main(["train", "--from", str(halves), "--run", str(tmp_path / "fork"), "--train.steps", "4"]) == 0
    forked = json.loads((tmp_path / "fork/summary.json").read_text())
    assert go_on(halves, "--train.steps", "4")["model_sha256"] == forked["model_sha256"] == whole["model_sha256"]


def test_an_adapter_that_adds_nothing_yet_goes_out_as_the_folder_and_a_trained_one_comes_back(settings_file, folder, tmp_path):
    run = start_run(settings_file, folder, tmp_path / "run")
    out = export(run, tmp_path / "out")
    theirs = {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}
    for name, each in load_file(out / "model.safetensors").items():
        assert each.dtype == theirs[name].dtype and torch.equal(each.view(torch.uint8), theirs[name].view(torch.uint8)), name
    go_on(run)
    adapter = export(run, tmp_path / "adapter", "--adapter")
    common = ("--pipeline.stages", "4", "--adapter", str(adapter), "--codec.name", "quantize")
    again = bring_in(settings_file, folder, tmp_path / "again", *common)
    assert torch.allclose(our_logits(again, some_ids()), our_logits(run, some_ids()), rtol=1e-5, atol=1e-6)
    back = export(again, tmp_path / "back", "--adapter")
    assert (back / "adapter_model.safetensors").read_bytes() == (adapter / "adapter_model.safetensors").read_bytes()


def test_what_cannot_be_is_refused_by_name(settings_file, folder, tmp_path, capsys):
    def refused(*words: str) -> str:
        assert cli.main([*words, "--config", settings_file]) != 0
        return capsys.readouterr().err

    begin = ("import", str(folder), "--run", str(tmp_path / "none"))
    assert "'x_proj'" in refused(*begin, "--adapter.rank", "2", "--adapter.targets", "x_proj")
    assert "'subspace'" in refused(*begin, "--codec.name", "subspace", "--adapter.rank", "2")
    assert "thinwire import" in refused("train", "--run", str(tmp_path / "none"), "--codec.name", "dense", "--adapter.rank", "2")
    run = start_run(settings_file, folder, tmp_path / "run")
    adapter = export(run, tmp_path / "adapter", "--adapter")
    assert "adapter.rank is 5" in refused(*begin, "--adapter", str(adapter), "--adapter.rank", "5")
    table = json.loads((adapter / "adapter_config.json").read_text())
    for word, value in (("use_dora", True), ("peft_type", "IA3"), ("r", 4), ("target_modules", ["q_proj"]), ("rank_pattern", {"a": 2})):
        (adapter / "adapter_config.json").write_text(json.dumps(table | {word: value}))
        assert "adapter" in refused(*begin, "--adapter", str(adapter)), word
    assert not (tmp_path / "none").exists()
