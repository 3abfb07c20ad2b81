"""A run goes on in another shape: the same data, the same losses to rounding; what a codec has learnt at a cut stays there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoint.support import change_manifest
from runs import train, unhurried
from thinwire import checkpoint
from thinwire.cli import main as cli

EXACT = ("--train.dtype", "fp64", "--codec.dtype", "fp64", "--model.free_layers", "1", "--train.checkpoint_every", "1")
DRIFT = ("--codec.drift_every", "2", "--codec.drift_rate", "0.5", "--model.dropout", "0.1")


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics/stage-all.jsonl").read_text().splitlines()]


def go_on(run: Path, steps: int, *words: str) -> dict:
    """Resume a run until a step."""
    with unhurried():
        assert cli.main(["train", "--run", str(run), "--resume", "--train.steps", str(steps), *words]) == 0
    return json.loads((run / "summary.json").read_text())


def error_of(capsys, run: Path, *words: str) -> str:
    capsys.readouterr()
    assert cli.main(["train", "--run", str(run), "--resume", "--train.steps", "9", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("words", [(), DRIFT, ("--train.optimizer", "muon"), ("--codec.name", "dense")], ids=["", "drift", "muon", "dense"])
def test_four_then_two_then_three_stages(config, tmp_path, words):
    words = (*EXACT, *words, "--train.decay", "0", "--pipeline.stages", "4")
    whole = train(config, tmp_path / "whole", *words)
    run = tmp_path / "run"
    train(config, run, *words, "--train.steps", "2")
    go_on(run, 4, "--pipeline.stages", "2", "--pipeline.split", "1,3", "--pipeline.microbatches", "4")
    again = go_on(run, 6, "--pipeline.stages", "3", "--pipeline.microbatches", "2")
    assert again["stages"] == 3 and again["tokens"] == whole["tokens"]
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)
    assert again["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-10)
    # Nothing of the older shapes is left, and each shape has folders of its own.
    folders = checkpoint.steps(run)
    assert [checkpoint.step_of(folder) for folder in folders] == [5, 6]
    assert all(folder.name.split("-")[2] == "2" and len(list(folder.iterdir())) == 6 for folder in folders)


def test_statistics_of_an_entropy_coded_boundary_stay_at_their_cut_and_begin_anew_at_others(config, tmp_path):
    words = ("--train.decay", "0", "--pipeline.stages", "4", "--train.checkpoint_every", "1", "--model.free_layers", "1")
    run = tmp_path / "run"
    train(config, run, *words, "--codec.entropy", "true", "--codec.bits", "4", "--train.steps", "3")
    go_on(run, 4, "--pipeline.stages", "2", "--pipeline.split", "1,3")
    before = load_file(checkpoint.steps(run)[-1] / "stage-0.safetensors")
    assert before["exits.1.second.statistics.activations.age"] == 4
    again = go_on(run, 6, "--pipeline.stages", "3")
    ages = {}
    for stage in range(3):
        held = load_file(checkpoint.steps(run)[-1] / f"stage-{stage}.safetensors")
        ages |= {name.split(".second.")[0]: int(tensor) for name, tensor in held.items() if name.endswith("activations.age")}
    assert again["stages"] == 3 and ages == {"exits.2": 2, "entries.2": 2, "exits.3": 2, "entries.3": 2}


def test_single_precision_and_a_few_bits(config, tmp_path):
    words = ("--train.decay", "0", "--pipeline.stages", "4", "--train.checkpoint_every", "1", "--model.free_layers", "1")
    train(config, tmp_path / "whole", *words)
    train(config, tmp_path / "run", *words, "--train.steps", "3")
    go_on(tmp_path / "run", 6, "--pipeline.stages", "1", "--pipeline.microbatches", "1")
    # The boundaries of bf16 are gone: what they rounded away makes the difference.
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


def test_eval_and_export_read_whichever_shape_is_newest(config, tmp_path, capsys):
    run = tmp_path / "run"
    words = (*EXACT, "--pipeline.stages", "4", "--train.steps", "2", "--train.decay", "0")
    first = train(config, run, *words)
    text = (run / "config.toml").read_text()
    # A run that was resumed in another shape and killed before its first checkpoint: its settings are of the new shape already.
    (run / "config.toml").write_text(text.replace("stages = 4", "stages = 2"))
    assert cli.main(["export", str(run), str(tmp_path / "old")]) == 0
    capsys.readouterr()
    assert cli.main(["eval", str(run), "--sequences", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 2 and found["loss"] == pytest.approx(first["val_loss"], rel=1e-10)
    second = go_on(run, 3)
    assert second["stages"] == 2
    assert cli.main(["export", str(run), str(tmp_path / "new")]) == 0
    capsys.readouterr()
    assert cli.main(["eval", str(run), "--sequences", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 3 and found["loss"] == pytest.approx(second["val_loss"], rel=1e-10)


LEARNING = {
    "anchored": ("--codec.name", "anchored", "--codec.projector", "learned", "--codec.projector_every", "1"),
    "autoencoder": ("--codec.name", "autoencoder"),
    "threshold": ("--codec.name", "threshold"),
    "bottleneck": ("--codec.name", "bottleneck"),
}


@pytest.mark.parametrize("words", LEARNING.values(), ids=LEARNING)
def test_cuts_at_which_something_was_learnt_must_stay(config, tmp_path, capsys, words):
    run = tmp_path / "run"
    train(config, run, *words, "--pipeline.stages", "3", "--train.steps", "2")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    message = error_of(capsys, run, "--pipeline.stages", "2")
    assert "has learnt at its cuts, before layers 2, 3; stage 1 of the new shape joins the layers before and behind 3: keep" in message
    message = error_of(capsys, run, "--pipeline.stages", "4")
    assert "before layers 2, 3; stage 0 of the new shape cuts before layer 1, where nothing was learnt: keep" in message
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    if "threshold" in words:
        message = error_of(capsys, run, "--pipeline.microbatches", "4")
        assert "with pipeline.microbatches 4, it has 2: what the codec 'threshold' sends depends on the microbatch" in message
    else:
        assert go_on(run, 3, "--pipeline.microbatches", "4")["steps"] == 3


def test_a_cut_at_which_nothing_was_learnt_may_go(config, tmp_path):
    words = ("--codec.name", "autoencoder", "--codec.from_layer", "2", "--train.decay", "0")
    train(config, tmp_path / "run", *words, "--pipeline.stages", "4", "--pipeline.split", "1,1,1,1", "--train.steps", "2")
    assert go_on(tmp_path / "run", 3, "--pipeline.stages", "3", "--pipeline.split", "2,1,1")["steps"] == 3


def test_the_free_layers_stay_together(config, tmp_path, capsys):
    train(config, tmp_path / "run", "--train.steps", "2", "--model.free_layers", "2")
    message = error_of(capsys, tmp_path / "run", "--pipeline.stages", "3")
    assert "model.free_layers is 2 but the last stage has 1 layer" in message and "at least 2, such as --pipeline.split 1,1,2" in message
    message = error_of(capsys, tmp_path / "run", "--pipeline.stages", "4")
    assert "with so many stages that cannot be, choose pipeline.stages 3 or fewer" in message


def test_another_shape_needs_all_parts(config, tmp_path, capsys):
    run = tmp_path / "run"
    train(config, run, "--pipeline.stages", "4", "--train.steps", "2", "--model.free_layers", "1")
    for path in run.glob("checkpoints/*/stage-2.*"):
        path.unlink()
    assert "holds no complete checkpoint of 2 stages; copy the parts" in error_of(capsys, run, "--pipeline.stages", "2")


def test_parts_that_do_not_belong_together_are_refused(config, tmp_path, capsys):
    run = tmp_path / "run"
    train(config, run, "--pipeline.stages", "4", "--train.steps", "2", "--model.free_layers", "1")
    train(config, tmp_path / "other", "--pipeline.stages", "4", "--train.steps", "2", "--model.free_layers", "1", "--seed", "1")
    folder = checkpoint.newest(run, 4)
    manifest = json.loads((folder / "stage-2.json").read_text())
    for ending in ("json", "safetensors"):
        shutil.copy(tmp_path / f"other/checkpoints/{folder.name}/stage-2.{ending}", folder)
    assert "stage-2.json has settings" in error_of(capsys, run, "--pipeline.stages", "2")
    change_manifest(folder / "stage-2.json", settings=manifest["settings"], data=manifest["data"])
    assert "differ in stream.basis_DK, which all stages share" in error_of(capsys, run, "--pipeline.stages", "2")


def test_writing_in_a_new_shape_leaves_the_old_checkpoint_alone(config, tmp_path):
    """Stopped before its first step, a resumed run writes the same step again: the only checkpoint must survive a power cut then."""
    run = tmp_path / "run"
    train(config, run, *EXACT, "--pipeline.stages", "4", "--train.steps", "2")
    old = checkpoint.newest(run, 4)
    before = {path: path.read_bytes() for path in old.iterdir()}
    go_on(run, 3, "--pipeline.stages", "2")
    assert {path: path.read_bytes() for path in old.iterdir()} == before
    assert [len(list(folder.iterdir())) for folder in checkpoint.steps(run)] == [8, 4]


def test_a_stale_part_of_an_earlier_stretch_is_never_mixed_in(config, tmp_path):
    """Four stages, two, four again: what the first stretch left half written at a later step does not complete the third one's."""
    run = tmp_path / "run"
    words = (*EXACT, "--pipeline.stages", "4", "--train.decay", "0")
    train(config, run, *words, "--train.steps", "4")
    for path in run.glob("checkpoints/step-000004/stage-[01].*"):
        path.unlink()
    (run / "checkpoints/step-000003").rename(run / "checkpoints/step-000002")
    for index in range(4):
        change_manifest(run / f"checkpoints/step-000002/stage-{index}.json", step=2)
    go_on(run, 4, "--pipeline.stages", "2", "--train.seconds", "0.000001")
    assert checkpoint.newest(run, 2).name.startswith("step-000003-1-")
    go_on(run, 4, "--pipeline.stages", "4")
    newest = checkpoint.newest(run, 4)
    assert newest.name.startswith("step-000004-2-") and len(list(newest.iterdir())) == 8
    assert len(list((run / "checkpoints/step-000004").iterdir())) == 4
    for path in newest.glob("stage-[23].*"):
        path.unlink()
    assert checkpoint.newest(run, 4).name.startswith("step-000003-1-")
