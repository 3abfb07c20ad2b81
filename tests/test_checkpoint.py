"""Checkpoints: complete or absent, checked before they are read, never unpickled."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from helpers import make_pipeline, parameters, random_ids
from thinwire import checkpoint
from thinwire.checkpoint import Position
from thinwire.config import TrainConfig
from thinwire.optimizer import StageOptimizer

FACTS = {"config": "c", "data": "d"}


def trained(steps: int = 2):
    pipeline = make_pipeline("subspace", stages=2, rank=6, dtype="fp32")
    optimizers = [StageOptimizer(stage, TrainConfig()) for stage in pipeline.stages]
    for step in range(steps):
        pipeline.step(random_ids(seed=step), step, 4 * step)
        for optimizer in optimizers:
            optimizer.step(1.0, 1.0)
    return pipeline, optimizers


def save(run: Path, step: int = 2, steps: int = 2):
    pipeline, optimizers = trained(steps)
    return pipeline, optimizers, checkpoint.save(run, pipeline.stages, optimizers, Position(step, 1.5), FACTS)


def test_weights_and_optimizer_state_come_back_bit_for_bit(tmp_path):
    first, optimizers, folder = save(tmp_path)
    second, others = trained(0)
    assert checkpoint.weights_sha256(second.stages) != checkpoint.weights_sha256(first.stages)
    assert checkpoint.load(folder, second.stages, others, FACTS) == Position(2, 1.5)
    assert checkpoint.weights_sha256(second.stages) == checkpoint.weights_sha256(first.stages)
    for before, after in zip(optimizers, others, strict=True):
        assert before.state_tensors().keys() == after.state_tensors().keys()
        assert all(torch.equal(value, after.state_tensors()[key]) for key, value in before.state_tensors().items())


def test_only_the_newest_complete_ones_stay(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [folder.name for folder in checkpoint.steps(tmp_path)] == ["step-000002", "step-000003"]


def test_steps_are_ordered_by_number(tmp_path):
    for name in ("step-1000000", "step-999999", "step-000002", "step-000002.bak", "stepladder"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [folder.name for folder in checkpoint.steps(tmp_path)] == ["step-000002", "step-999999", "step-1000000"]


def test_an_unfinished_checkpoint_is_passed_over(tmp_path):
    save(tmp_path, 1)
    _, _, folder = save(tmp_path, 2)
    (folder / "stage-1.json").unlink()
    assert checkpoint.newest(tmp_path, 2).name == "step-000001"


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(ValueError, match="holds no complete checkpoint of 2 stages"):
        checkpoint.newest(tmp_path, 2)


def test_a_flipped_bit_is_found(tmp_path):
    pipeline, optimizers, folder = save(tmp_path)
    path = folder / "stage-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"stage-1.safetensors does not match the sha256.*damaged"):
        checkpoint.load(folder, pipeline.stages, optimizers, FACTS)


def test_a_pickle_in_its_place_is_refused_unread(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    pipeline, optimizers, folder = save(tmp_path)
    path = folder / "stage-0.safetensors"
    path.write_bytes(pickle.dumps(Trap()))
    manifest = json.loads((folder / "stage-0.json").read_text()) | {"sha256": checkpoint.file_sha256(path)}
    (folder / "stage-0.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="is not a safetensors file"):
        checkpoint.load(folder, pipeline.stages, optimizers, FACTS)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "change, message",
    [({"data": "other"}, "has data 'other', this run has 'd'"), ({"format": 9}, "has format 9"), ({"stage": 1}, "has stage 1")],
)
def test_a_manifest_of_something_else_is_refused(tmp_path, change, message):
    pipeline, optimizers, folder = save(tmp_path)
    path = folder / "stage-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        checkpoint.load(folder, pipeline.stages, optimizers, FACTS)


def test_a_damaged_manifest_is_refused(tmp_path):
    pipeline, optimizers, folder = save(tmp_path)
    (folder / "stage-0.json").write_text("{")
    with pytest.raises(ValueError, match=r"stage-0.json cannot be read"):
        checkpoint.load(folder, pipeline.stages, optimizers, FACTS)


def test_another_shape_is_refused_by_the_name_that_differs(tmp_path):
    _, _, folder = save(tmp_path)
    other = make_pipeline("subspace", stages=2, rank=5, dtype="fp32")
    with pytest.raises(ValueError, match=r"embedding.weight is \(97, 6\) there, \(97, 5\) here"):
        checkpoint.load(folder, other.stages, None, FACTS)


def test_a_failed_load_changes_no_weight(tmp_path):
    _, _, folder = save(tmp_path)
    (folder / "stage-1.safetensors").write_bytes(b"")
    fresh, optimizers = trained(0)
    before = {name: value.detach().clone() for name, value in parameters(fresh).items()}
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.load(folder, fresh.stages, optimizers, FACTS)
    assert all(torch.equal(before[name], value) for name, value in parameters(fresh).items())


def test_nothing_in_the_package_unpickles():
    sources = Path(checkpoint.__file__).parent.rglob("*.py")
    for path in sources:
        text = path.read_text()
        for word in ("import pickle", "torch.load", "from pickle", "marshal", "shelve", "allow_pickle=True", "weights_only"):
            assert word not in text, (path, word)
