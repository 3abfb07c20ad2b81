"""One stage at a time: the losses of the whole pipeline, in bounded memory; and shards that are streamed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf.support import load_pipeline, train_run
from patience import HANG
from thinwire import checkpoint
from thinwire.checkpoint.safetensors import Piece, write_file
from thinwire.config.toml import CONFIG_FILE, load_config, read_config, to_toml
from thinwire.hf.checkpointed import open_checkpoint
from thinwire.hf.description import form_of
from thinwire.hf.measure import validation_windows
from thinwire.hf.plain import bound_axes, plans_of
from thinwire.model.cut import StagePlan
from thinwire.model.names import EMBEDDING, split_block_name
from thinwire.pipeline import by_stage as staged


@pytest.mark.parametrize(
    "words",
    [
        ("--codec.drift_every", "2", "--codec.bits", "4", "--pipeline.stages", "4"),
        ("--codec.name", "threshold", "--codec.warmup", "2", "--train.dtype", "bf16"),
        ("--codec.name", "anchored", "--codec.projector", "learned", "--codec.projector_every", "1"),
        ("--codec.name", "dense", "--model.tied_head", "--model.output_dropout", "0.2"),
    ],
    ids=" ".join,
)
def test_the_losses_of_the_whole_pipeline_bit_for_bit(config, tmp_path, words):
    run = train_run(config, tmp_path / "run", *words)
    windows = validation_windows(read_config(run / CONFIG_FILE), run, 8)
    source = open_checkpoint(run)
    assert staged.evaluate_by_stage(source.config, windows, source.fill, step=3) == load_pipeline(run).evaluate(windows, step=3)


def test_without_boundaries_nothing_is_rounded(config, tmp_path):
    coarse = train_run(config, tmp_path / "coarse", "--codec.name", "quantize", "--codec.bits", "2", "--train.rate", "0.1")
    windows, source = validation_windows(read_config(coarse / CONFIG_FILE), coarse, 8), open_checkpoint(coarse)
    plain = staged.evaluate_by_stage(source.config, windows, source.fill, step=3, boundaries=False)
    pipeline = load_pipeline(coarse)
    for stage in pipeline.stages:
        staged.leave_ends_out(stage, torch.float32)
    payload: tuple = ()
    for stage in pipeline.stages:
        payload = stage(windows, payload, staged.Context(3, torch.arange(8), training=False))
    assert plain == pytest.approx(float(payload[0].detach()), rel=1e-6)
    assert plain != pytest.approx(staged.evaluate_by_stage(source.config, windows, source.fill, step=3), rel=1e-4)


def test_a_file_written_in_rows_is_read_by_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr("thinwire.checkpoint.safetensors.CHUNK_BYTES", 64)
    tensors = {"a": torch.arange(7), "b": torch.randn(33, 5).bfloat16(), "c": torch.randn(3), "d": torch.tensor(4), "e": torch.ones(0, 3)}

    def piece(name, tensor):
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        return Piece(name, tuple(tensor.shape), tensor.dtype, lambda start, stop: rows[start:stop])

    write_file(tmp_path / "x.safetensors", [piece(*item) for item in tensors.items()])
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items())


EXPORT = """
import sys, torch
from pathlib import Path
from thinwire.hf.export import ExportCommand, export
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
torch.set_num_threads(1)
torch.ones(64, 64).double() @ torch.ones(64, 64).double()  # the library's own buffers
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
export(ExportCommand(run=Path(sys.argv[1]), out=Path(sys.argv[2]), shard_size="40MB", sequences=0))
print(status("VmHWM") - before)
"""


def make_large_run(run: Path) -> None:
    """Write a run of 150 MB in its plain form, all weights alike, without ever building it."""
    config = load_config("laptop")
    model = replace(config.model, vocabulary=13000, width=512, layers=8, heads=8, ffn=1408, free_layers=2)
    config = replace(config, model=model, codec=replace(config.codec, rank=64))
    folder = run / "checkpoints/step-000001"
    folder.mkdir(parents=True)
    (run / CONFIG_FILE).write_text(to_toml(config))
    bound = bound_axes(model, 6)
    for plan in plans_of(config):
        shapes = {"stream.basis_DK": (512, 64)} | {
            entry.ours: (13000, 64) if entry.ours == EMBEDDING else (64, entry.shape[1]) if entry.ours in bound else entry.shape
            for entry in form_of(model).tensors(model)
            if entry.ours and is_in(entry.ours, plan)
        }
        pieces = [
            Piece(name, shape, torch.float32, lambda start, stop, shape=shape: torch.full((stop - start, *shape[1:]), 0.1))
            for name, shape in shapes.items()
        ]
        tensors = folder / f"stage-{plan.index}.safetensors"
        manifest = {"format": checkpoint.FORMAT, "stage": plan.index, "stages": plan.count, "layers": list(plan.layers)}
        manifest |= checkpoint.facts(config, "none") | {"step": 1, "seconds": 0.0, "basis_version": 0, "before": ""}
        manifest |= {"sha256": write_file(tensors, pieces), "bytes": tensors.stat().st_size}
        (folder / f"stage-{plan.index}.json").write_bytes(checkpoint.encode_manifest(manifest))


def is_in(name: str, plan: StagePlan) -> bool:
    inner = split_block_name(name)
    return inner[0] in plan.layers if inner else (plan.first if name == EMBEDDING else plan.last)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_under_two_shards(tmp_path):
    make_large_run(tmp_path / "run")
    started = subprocess.run(
        [sys.executable, "-c", EXPORT, *map(str, (tmp_path / "run", tmp_path / "out"))], capture_output=True, timeout=HANG
    )
    assert started.returncode == 0, started.stderr.decode()
    grown = int(started.stdout)
    shards = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(shards) >= 4 and sum(shards) > 140e6
    assert grown < 2 * max(shards), f"{grown / 1e6:.1f} MB with shards of {max(shards) / 1e6:.1f} MB"
