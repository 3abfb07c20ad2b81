"""What a checkpoint holds against what is to be filled with it: number formats, and optimizer state of every parameter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.support import FACTS, change_manifest, save, trained
from helpers import make_pipeline, random_ids
from runs import train
from thinwire import checkpoint
from thinwire.checkpoint import Position
from thinwire.cli import main as cli
from thinwire.config.sections import TrainConfig
from thinwire.optim.optimizers import StageOptimizer

MOMENT = "optimizer/layers.1.ffn.down.weight/exp_avg"


def rewrite(folder: Path, index: int, change) -> None:
    """Change the tensors of a part, and seal it anew."""
    path = folder / f"stage-{index}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    change_manifest(path.with_suffix(".json"), sha256=checkpoint.file_sha256(path), bytes=path.stat().st_size)


def relabel(folder: Path, index: int, name: str, code: str) -> None:
    """Say of a tensor's bytes that they are numbers of another kind of the same size."""
    path = folder / f"stage-{index}.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header[name]["dtype"] = code
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    assert len(text) == size
    path.write_bytes(data[:8] + text + data[8 + size :])
    change_manifest(path.with_suffix(".json"), sha256=checkpoint.file_sha256(path))


@pytest.mark.parametrize("labels", [("step", "exp_avg", "shared_sq"), ("exp_avg",), ("shared_sq",), ("step",)], ids=str)
def test_missing_moments_of_one_parameter_are_missed(tmp_path, labels):
    _, _, folder = save(tmp_path)
    rewrite(folder, 0, lambda tensors: [tensors.pop(f"optimizer/layers.1.ffn.down.weight/{label}") for label in labels])
    pipeline, optimizers = trained(0)
    before = checkpoint.weights_sha256(pipeline.stages)
    with pytest.raises(
        ValueError, match=r"the optimizer state in .*step-000002 does not fit stage 0: layers.1.ffn.down.weight/\w+ is missing"
    ):
        checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)
    assert checkpoint.weights_sha256(pipeline.stages) == before and not any(each.state_tensors() for each in optimizers)
    assert checkpoint.load_stages(folder, pipeline.stages, None, FACTS) == Position(2, 1.5)  # it can be evaluated


def test_older_manifests_do_not_hide_missing_moments(tmp_path):
    _, _, folder = save(tmp_path)
    for path in folder.glob("*.json"):
        manifest = json.loads(path.read_text())
        assert manifest.pop("stateless") == []
        path.write_bytes(checkpoint.encode_manifest(manifest))
    pipeline, optimizers = trained(0)
    assert checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS) == Position(2, 1.5)
    rewrite(folder, 0, lambda tensors: tensors.pop(MOMENT))
    with pytest.raises(ValueError, match=r"exp_avg is missing there, \(6, 48\) float32 here"):
        checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)


@pytest.mark.parametrize(
    "change, told",
    [
        ({MOMENT: torch.zeros(6, 47)}, r"is \(6, 47\) float32 there, \(6, 48\) float32 here"),
        ({MOMENT: torch.zeros(6, 48, dtype=torch.float64)}, r"is \(6, 48\) float64 there"),
        ({"optimizer/layers.1.ffn.down.weight/max_exp_avg_sq": torch.zeros(6, 48)}, "max_exp_avg_sq is .* there, missing here"),
        ({"optimizer/layers.9.ffn.down.weight/exp_avg": torch.zeros(6, 48)}, "layers.9.ffn.down.weight/exp_avg is .* there, missing here"),
        ({"optimizer/step": torch.zeros(())}, "step is .* there, missing here"),
    ],
)
def test_state_of_something_else_is_refused(tmp_path, change, told):
    _, _, folder = save(tmp_path)
    rewrite(folder, 0, lambda tensors: tensors.update(change))
    pipeline, optimizers = trained(0)
    with pytest.raises(ValueError, match=told):
        checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)


@pytest.mark.parametrize("name", ["embedding.weight", "stream.basis_DK", MOMENT])
def test_numbers_of_another_kind_are_refused(tmp_path, name):
    _, _, folder = save(tmp_path)
    relabel(folder, 0, name, "I32")
    pipeline, optimizers = trained(0)
    with pytest.raises(ValueError, match=r"int32 there, \(\d+, \d+\) float32 here"):
        checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)


@pytest.mark.parametrize("optimizer", ["shared", "adamw", "muon"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_state_is_what_the_optimizer_foretells(optimizer, dtype):
    """So a checkpoint of any optimizer can be resumed, whatever torch calls its moments."""
    pipeline = make_pipeline("subspace", rank=6, dtype=dtype)
    pipeline.step(random_ids(), 0, 0)
    for stage in pipeline.stages:
        each = StageOptimizer(stage, TrainConfig(optimizer=optimizer))
        foretold = {f"{name}/{label}": tensor for name, state in each.state_forms().items() for label, tensor in state.items()}
        sizes = each.state_sizes()
        each.step(1.0, 1.0)
        found = each.state_tensors()
        assert found.keys() == foretold.keys()
        assert all((found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype) for name, tensor in foretold.items())
        assert sum(map(sum, sizes)) == sum(tensor.nbytes for tensor in found.values())


def test_parameters_that_no_step_has_updated_have_no_state(tmp_path):
    """During its warm-up a codec's own parameters learn nothing."""
    pipeline = make_pipeline("autoencoder", stages=2, dtype="fp32", warmup=3)
    optimizers = [StageOptimizer(stage, TrainConfig()) for stage in pipeline.stages]
    pipeline.step(random_ids(), 0, 0)
    for optimizer in optimizers:
        optimizer.step(1.0, 1.0)
    folder = checkpoint.save(tmp_path, pipeline.stages, optimizers, Position(1, 1.0), FACTS)
    untouched = [json.loads((folder / f"stage-{stage}.json").read_text())["stateless"] for stage in range(2)]
    assert all(untouched) and all(name.startswith(("exits.", "entries.")) for names in untouched for name in names)
    again = make_pipeline("autoencoder", stages=2, dtype="fp32", warmup=3)
    others = [StageOptimizer(stage, TrainConfig()) for stage in again.stages]
    assert checkpoint.load_stages(folder, again.stages, others, FACTS) == Position(1, 1.0)
    change_manifest(folder / "stage-0.json", stateless=[])
    with pytest.raises(ValueError, match=r"exits\.\S+ is missing there"):
        checkpoint.load_stages(folder, again.stages, others, FACTS)


@pytest.mark.parametrize("verb", ["eval", "export"])
def test_no_verb_takes_bits_for_other_numbers(config, tmp_path, capsys, verb):
    train(config, tmp_path / "run", "--train.steps", "1")
    relabel(tmp_path / "run/checkpoints/step-000001", 1, "head.weight", "I32")
    words = [str(tmp_path / "run"), *([str(tmp_path / "out")] if verb == "export" else [])]
    assert cli.main([verb, *words]) == 2
    assert "head.weight is (300, 32) int32 there, (300, 32) float32" in (said := capsys.readouterr().err) and "Traceback" not in said
