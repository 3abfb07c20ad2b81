"""Loading: the same bits, checked before anything is changed, never unpickled."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from checkpoint.support import FACTS, change_manifest, flip, save, trained
from helpers import make_pipeline, parameters
from thinwire import checkpoint
from thinwire.checkpoint import Position


def test_weights_and_optimizer_state_come_back_bit_for_bit(tmp_path):
    first, optimizers, folder = save(tmp_path)
    second, others = trained(0)
    assert checkpoint.weights_sha256(second.stages) != checkpoint.weights_sha256(first.stages)
    assert checkpoint.load_stages(folder, second.stages, others, FACTS) == Position(2, 1.5)
    assert checkpoint.weights_sha256(second.stages) == checkpoint.weights_sha256(first.stages)
    for before, after in zip(optimizers, others, strict=True):
        assert before.state_tensors().keys() == after.state_tensors().keys()
        assert all(torch.equal(value, after.state_tensors()[key]) for key, value in before.state_tensors().items())


def test_loaded_tensors_stand_in_memory_of_torch(tmp_path):
    """A tensor that is mapped from a file has the file's alignment, and loses its values when the file is overwritten."""
    _, _, folder = save(tmp_path)
    pipeline, optimizers = trained(0)
    checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)
    before = checkpoint.weights_sha256(pipeline.stages)
    tensors = [tensor for stage in pipeline.stages for tensor in stage.state_dict().values()]
    tensors += [tensor for optimizer in optimizers for tensor in optimizer.state_tensors().values()]
    kept = [tensor.clone() for tensor in tensors]
    for path in folder.glob("*.safetensors"):
        with path.open("rb+") as file:
            file.write(b"\xff" * path.stat().st_size)
    assert checkpoint.weights_sha256(pipeline.stages) == before
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, kept, strict=True))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_a_flipped_bit_is_found(tmp_path):
    pipeline, optimizers, folder = save(tmp_path)
    flip(folder / "stage-1.safetensors", -5)
    with pytest.raises(ValueError, match=r"stage-1.safetensors does not match the sha256.*damaged"):
        checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)


class Trap:
    """Something that acts when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("place", ["stage-0.safetensors", "stage-0.json", "both"])
def test_a_pickle_in_its_place_is_refused_unread(tmp_path, place):
    pipeline, optimizers, folder = save(tmp_path)
    bomb = pickle.dumps(Trap(tmp_path / "executed"))
    path = folder / "stage-0.safetensors"
    if place != "stage-0.json":
        path.write_bytes(bomb)
        change_manifest(path.with_suffix(".json"), sha256=checkpoint.file_sha256(path), bytes=len(bomb))
    if place != "stage-0.safetensors":
        path.with_suffix(".json").write_bytes(bomb)
    with pytest.raises(ValueError, match=r"is not a safetensors file" if place == path.name else "stage-0.json cannot be read"):
        checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": "other"}, "has data 'other', this run has 'd'"),
        ({"settings": "other"}, "has settings 'other', this run has 'c'"),
        ({"format": 9}, r"has format 9, this version reads 1 and 2; use the thinwire that wrote it"),
        ({"stage": 1}, "has stage 1"),
    ],
)
def test_a_manifest_of_something_else_is_refused(tmp_path, change, message):
    pipeline, optimizers, folder = save(tmp_path)
    change_manifest(folder / "stage-0.json", **change)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format": 2}', " " * 2_000_000, "\xff"])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    pipeline, optimizers, folder = save(tmp_path)
    (folder / "stage-0.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"stage-0.json cannot be read"):
        checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)
    assert checkpoint.complete(tmp_path) == []


def test_a_manifest_of_format_1_can_be_resumed(tmp_path):
    """It had no checksum and no shape, and its hash of the settings was another."""
    pipeline, _, folder = save(tmp_path)
    for path in folder.glob("*.json"):
        manifest = json.loads(path.read_text())
        for name in ("checksum", "bytes", "split", "microbatches", "before", "settings"):
            del manifest[name]
        path.write_text(json.dumps(manifest | {"format": 1, "config": "old"}, indent=1))
    again, others = trained(0)
    assert checkpoint.load_stages(checkpoint.newest(tmp_path, 2), again.stages, others, FACTS) == Position(2, 1.5)
    assert checkpoint.weights_sha256(again.stages) == checkpoint.weights_sha256(pipeline.stages)


def test_another_model_is_refused_by_the_name_that_differs(tmp_path):
    _, _, folder = save(tmp_path)
    other = make_pipeline("subspace", stages=2, rank=5, dtype="fp32")
    with pytest.raises(ValueError, match=r"embedding.weight is \(97, 6\) float32 there, \(97, 5\) float32 here"):
        checkpoint.load_stages(folder, other.stages, None, FACTS)


def test_a_failed_load_changes_no_weight(tmp_path):
    _, _, folder = save(tmp_path)
    (folder / "stage-1.safetensors").write_bytes(b"")
    fresh, optimizers = trained(0)
    before = {name: value.detach().clone() for name, value in parameters(fresh).items()}
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.load_stages(folder, fresh.stages, optimizers, FACTS)
    assert all(torch.equal(before[name], value) for name, value in parameters(fresh).items())
