"""Manifests that are written well and say nonsense, and files that are none: refused in one line, never a traceback, never a wait."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from checkpoint.support import FACTS, change_manifest, save, trained
from thinwire import checkpoint
from thinwire.checkpoint import manifest
from thinwire.util.files import read_small

BAD = {
    "format": [True, 2.0],
    "stage": [None, -1, "0", 0.0, False, [0], 2**63],
    "stages": [0, -2, "2", None, 2.0, 2**40, True],
    "layers": [None, "0,1", [], [0, 2], [1, 0], [0, True], [[0]], {"0": 1}, [0.0, 1.0]],
    "settings": [None, 3, ["c"]],
    "data": [None, 0],
    "step": [None, -1, "2", 2.5, True, 10**400],
    "seconds": [None, "1", -1.0, float("nan"), float("inf"), 10**400, True],
    "basis_version": [None, -1, "0", 0.5],
    "sha256": [None, "", "0" * 63, "G" * 64, 7],
    "split": [None, "", "2,", "0,4", "2;2", 4, [2, 2], "٢,٢"],
    "microbatches": [None, 0, "2", 2.0],
    "before": [None, 1, []],
    "bytes": [None, -1, "9", 1e9],
    "stateless": [None, "embedding.weight", [1]],
    "everyone": [None, -2, "2", 1.0, True],
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


def refused(run: Path, folder: Path, match: str) -> None:
    """Nobody takes the checkpoint for one, and whoever names it hears why."""
    pipeline, optimizers = trained(0)
    with pytest.raises(ValueError, match=match):
        checkpoint.load_stages(folder, pipeline.stages, optimizers, FACTS)
    assert checkpoint.complete(run) == [] and checkpoint.parts_of(folder) is None
    assert checkpoint.survey(run).available([pipeline.stages[0].plan], verify=True) == []


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Return a run with one checkpoint, to be copied."""
    run = tmp_path_factory.mktemp("run")
    save(run)
    return run


@pytest.fixture
def run(written, tmp_path) -> Path:
    for path in written.glob("checkpoints/*/*"):
        copy = tmp_path / path.relative_to(written)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("name, value", CASES, ids=lambda value: str(value)[:20])
def test_a_field_that_is_not_what_it_should_be(run, name, value):
    folder = run / "checkpoints/step-000002"
    change_manifest(folder / "stage-0.json", **{name: value})
    refused(run, folder, rf"stage-0.json cannot be read \(its {name} is .*not .*\); delete")


@pytest.mark.parametrize("name", sorted(set(BAD) - {"format", "stateless", "everyone"}))
def test_a_field_that_is_missing(run, name):
    folder = run / "checkpoints/step-000002"
    manifest = json.loads((folder / "stage-0.json").read_text())
    del manifest[name]
    (folder / "stage-0.json").write_bytes(checkpoint.encode_manifest(manifest))
    refused(run, folder, rf"stage-0.json cannot be read \(it has no {name}\); delete")


def test_a_stage_beyond_the_last(run):
    folder = run / "checkpoints/step-000002"
    change_manifest(folder / "stage-0.json", stages=1, stage=1)
    refused(run, folder, "it is of stage 1, counted from 0, of 1 stages")


@pytest.mark.parametrize("depth", [300, 900, 20_000])
def test_a_field_that_is_nested_deeply(run, depth):
    """Deep enough for the reader or only for the writer that checks what was read: neither may fail in its own way."""
    folder = run / "checkpoints/step-000002"
    (folder / "stage-0.json").write_text('{"format": 2, "more": ' + "[" * depth + "]" * depth + "}")
    refused(run, folder, r"stage-0.json cannot be read \(it (is nested too deeply|does not match its checksum)\)")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def endpoint(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


@pytest.mark.skipif(os.name != "posix", reason="makes pipes and links to devices")
@pytest.mark.parametrize("make", [pipe, device, Path.mkdir, endpoint])
@pytest.mark.parametrize("name", ["stage-0.json", "stage-0.safetensors"])
def test_what_is_no_file_is_refused_at_once(run, name, make, monkeypatch):
    folder = run / "checkpoints/step-000002"
    monkeypatch.chdir(folder)  # the address of an endpoint is short
    (folder / name).unlink()
    make(folder / name)
    refused(run, folder, r"stage-0.json cannot be read" if name.endswith("json") else "does not match the sha256")


def test_a_manifest_without_end_is_not_read_to_it(run):
    path = run / "long"
    path.write_bytes(b" " * 1000)
    with pytest.raises(ValueError, match="more than 99 bytes"):
        read_small(path, 99)


def test_a_manifest_of_many_levels_is_not_written_again(monkeypatch):
    """To compare it with its checksum would take time for each value times each level above it: minutes for a megabyte."""

    def encode(content: dict) -> bytes:
        raise AssertionError("it was written again")

    monkeypatch.setattr(manifest, "encode_manifest", encode)
    with pytest.raises(ValueError, match="nested too deeply"):
        manifest.decode_manifest(b'{"format": 2, "data": ' + b"[" * 900 + b"0," * 400_000 + b"0" + b"]" * 900 + b"}")
