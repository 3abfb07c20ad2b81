"""A power cut at any byte of a write, and a flipped bit anywhere: the checkpoint before is chosen, damage is never trained on."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from checkpoint.support import FACTS, flip, save, trained
from thinwire import checkpoint
from thinwire.checkpoint import Position, writing

PARTS = [f"stage-{index}.{ending}" for index in (0, 1) for ending in ("safetensors", "json")]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A run with checkpoints of two steps."""
    run = tmp_path_factory.mktemp("run")
    save(run, 1, steps=1)
    save(run, 2, steps=2)
    return run


def positions(path: Path, count: int, seed: int = 0) -> list[int]:
    """Choose bytes of a file: the first and last ones, and some between."""
    size = path.stat().st_size
    between = random.Random(seed).sample(range(size), min(size, count))
    return sorted({0, 1, 7, 8, 9, size // 2, size - 1, *between})


def loads(run: Path, step: int) -> bool:
    """Tell whether the newest checkpoint that would be chosen is of that step, and load it."""
    pipeline, optimizers = trained(0)
    folder = checkpoint.common(run, [checkpoint.survey(run).available([stage.plan for stage in pipeline.stages])], 2)
    assert folder == checkpoint.newest(run, 2)
    return checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS).step == step


@pytest.mark.parametrize("name", PARTS)
def test_a_file_cut_off_at_any_byte(two, tmp_path, name):
    run = shutil.copytree(two, tmp_path / "run")
    path = run / "checkpoints/step-000002" / name
    data = path.read_bytes()
    places = range(len(data)) if path.suffix == ".json" else positions(path, 40)
    for place in places:
        path.write_bytes(data[:place])
        assert checkpoint.newest(run, 2).name == "step-000001", place
    assert loads(run, 1)
    path.unlink()
    assert loads(run, 1)
    path.write_bytes(data)
    assert loads(run, 2)


class PowerCut(BaseException):
    """What a power cut looks like to the process: it just ends."""


@pytest.fixture(scope="module")
def later():
    """A model after two steps, with its optimizers."""
    return trained(2)


@pytest.mark.parametrize("call", range(24))
def test_a_write_that_ends_at_any_call(two, later, tmp_path, monkeypatch, call):
    """Let the process end at its n-th change of the disk, without any tidying up; then the file that is under way is cut off too."""
    shutil.copytree(two / "checkpoints/step-000001", tmp_path / "checkpoints/step-000001")
    pipeline, optimizers = later
    count = 0

    def counted(function):
        def wrapper(*arguments, **words):
            nonlocal count
            count += 1
            if count > call:
                raise PowerCut
            return function(*arguments, **words)

        return wrapper

    for place, names in ((writing.os, ("fsync", "replace")), (Path, ("unlink", "replace", "rmdir", "mkdir"))):
        for name in names:
            monkeypatch.setattr(place, name, counted(getattr(place, name)))
    try:
        checkpoint.save(tmp_path, pipeline.stages, optimizers, Position(2, 0.0), FACTS)
    except PowerCut:
        ended = True
    else:
        ended = False
    monkeypatch.undo()
    for path in tmp_path.rglob("*.tmp"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    manifests = len(list(tmp_path.glob("checkpoints/step-000002/*.json")))
    assert loads(tmp_path, 2 if manifests == 2 else 1)
    assert ended or call > 15, "a write changes the disk more often than that"
    checkpoint.save(tmp_path, pipeline.stages, optimizers, Position(2, 0.0), FACTS)
    assert loads(tmp_path, 2)


def test_a_bit_flipped_anywhere_in_a_manifest(two, tmp_path):
    run = shutil.copytree(two, tmp_path / "run")
    folder = run / "checkpoints/step-000002"
    path = folder / "stage-0.json"
    data, draw = path.read_bytes(), random.Random(1)
    for place in range(len(data)):
        flip(path, place, draw.randrange(8))
        with pytest.raises(ValueError, match=r"stage-0.json (cannot be read|has format)"):
            checkpoint.read_manifest(folder, 0, FACTS)
        assert checkpoint.newest(run, 2).name == "step-000001"
        path.write_bytes(data)


def test_a_bit_flipped_anywhere_in_the_tensors(two, tmp_path):
    run = shutil.copytree(two, tmp_path / "run")
    folder = run / "checkpoints/step-000002"
    path, draw = folder / "stage-1.safetensors", random.Random(2)
    data = path.read_bytes()
    pipeline, optimizers = trained(0)
    before = checkpoint.weights_sha256(pipeline.stages)
    plans = [stage.plan for stage in pipeline.stages]
    for place in positions(path, 40):
        flip(path, place, draw.randrange(8))
        with pytest.raises(ValueError, match=r"stage-1.safetensors does not match the sha256"):
            checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)
        assert checkpoint.survey(run).available(plans, verify=True) == ["step-000001"]
        path.write_bytes(data)
    assert checkpoint.weights_sha256(pipeline.stages) == before
