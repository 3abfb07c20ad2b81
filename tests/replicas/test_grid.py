"""Replicas as worker processes: the numbers of one replica with the whole batch, and equal bits after losses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from faults.inject import GO, Fault, command_with, train_with
from patience import wait_until
from runs import train
from thinwire import checkpoint
from thinwire.cli import main as cli

GRID = ("--pipeline.mode", "workers", "--replicas.count", "2", "--train.batch", "8")
DOUBLE = ("--train.dtype", "fp64", "--train.clip", "0.5")
METHODS = (
    "allreduce",
    "hybrid",
    "powersgd:rank=2",
    "threshold:density=0.1",
    "gravac",
    "powergossip",
    "local:steps=2,momentum=0.5",
    "ist:steps=2",
)
METHODS += ("local:steps=2,warmup=3",)
QUICK = ("powersgd:rank=2", "local:steps=2,momentum=0.5")


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of a run's newest checkpoint."""
    *_, newest = sorted((run / "checkpoints").glob("step-*"))
    parts = [load_file(path) for path in sorted(newest.glob("stage-*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items() if "/" not in name}


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_two_replicas_with_allreduce_are_one_with_the_whole_batch(config, tmp_path, stages):
    words = ("--pipeline.stages", str(stages), "--train.steps", "20", *DOUBLE)
    one = train(config, tmp_path / "one", *words, "--train.batch", "8", "--pipeline.microbatches", "4")
    two = train(config, tmp_path / "two", *words, *GRID)
    assert two["replicas"] == 2 and two["tokens"] == one["tokens"]
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-9)
    alone = weights(tmp_path / "one")
    for run in (tmp_path / "two", tmp_path / "two/replica-1"):
        for name, tensor in weights(run).items():
            assert (tensor - alone[name]).abs().max() < 1e-10, name
    hashes = two["weights_sha256"]
    assert len(hashes) == 2 * stages and hashes[:stages] == hashes[stages:]


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        "--codec.drift_every 2 --codec.drift_rate 0.5 --model.dropout 0.1",
        "--codec.name anchored --codec.projector learned --codec.projector_every 2 --codec.bits 4",
        "--codec.drift_every 2 --codec.drift_rate 0.5 --replicas.exchange local:steps=3",
    ],
)
def test_replicas_share_a_basis_that_moves_and_what_is_learnt_at_a_boundary(config, tmp_path, words):
    hashes = train(config, tmp_path / "run", *GRID, *words.split())["weights_sha256"]
    assert hashes[:2] == hashes[2:] and hashes[0] != hashes[1]


@pytest.mark.full
def test_four_replicas_on_a_ring_end_as_one_model(config, tmp_path):
    words = ("--pipeline.mode", "workers", "--replicas.count", "4", "--train.batch", "8", "--pipeline.microbatches", "1")
    summary = train(config, tmp_path / "run", *words, "--replicas.graph", "ring", "--replicas.exchange", "powergossip")
    hashes = summary["weights_sha256"]
    assert hashes[:2] * 4 == hashes and summary["steps"] == 6


def test_bytes_are_split_and_counted(config, tmp_path):
    summary = train(config, tmp_path / "run", *GRID)
    split = summary["bytes_per_step"]
    # With two replicas each worker sends half of its gradients and half of the sums: all of its parameters once, in fp32.
    assert split["exchange"] == 2 * summary["trainable_parameters"] * 4
    payload = summary["bytes_per_token_forward"] + summary["bytes_per_token_backward"]
    assert split["boundary"] == pytest.approx(payload * 8 * 16)
    assert 0 < split["control"] < 20_000
    counted = [json.loads(line)["exchange_bytes"] for path in (tmp_path / "run").glob("**/stage-*.jsonl") for line in path.open()]
    assert sum(counted) == 6 * split["exchange"]
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics/stage-0.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "run", tmp_path / "run/replica-1")
    ]
    assert len(losses[0]) == 6 and losses[0] == losses[1]


@pytest.mark.parametrize("method", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in METHODS])
def test_a_worker_killed_in_the_exchange_leaves_equal_weights(config, tmp_path, method):
    words = (*GRID, "--replicas.exchange", method, "--train.checkpoint_every", "1")
    calm = train(config, tmp_path / "calm", *words)
    command = ["--config", config, "--run", str(tmp_path / "run"), *words]
    faults = [Fault(1, "exchange", 3, replica=1), Fault(0, "forward", 5)]
    heard: list[tuple[int, dict]] = []
    disturbed = train_with(command, faults, tmp_path / "struck", heard)
    assert sum("lost" in message for _, message in heard) == 2
    assert disturbed["weights_sha256"] == calm["weights_sha256"]


@pytest.mark.parametrize("method", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in METHODS])
def test_a_resumed_grid_has_the_bits_of_one_that_was_not_stopped(config, tmp_path, method):
    words = (*GRID, "--replicas.exchange", method)
    whole = train(config, tmp_path / "run", *words)
    for folder in (tmp_path / "run").glob("**/checkpoints/step-000006"):
        shutil.rmtree(folder)
    resumed = train(config, tmp_path / "run", "--resume", *words)
    assert resumed["steps"] == 6 and resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.full
@pytest.mark.parametrize("method", ["local:steps=4", "ist:steps=4"])
def test_a_run_that_is_made_longer_within_a_round_ends_as_one_model(config, tmp_path, method):
    """Its last step was a meeting within a round: what comes before the next one must not be taken for a part."""
    words = (*GRID, "--replicas.exchange", method, "--train.validate_every", "0", "--train.decay", "0")
    short = train(config, tmp_path / "run", *words)
    before = weights(tmp_path / "run")
    longer = train(config, tmp_path / "run", "--resume", *words, "--train.steps", "12")
    assert longer["steps"] == 12 and longer["weights_sha256"][:2] == longer["weights_sha256"][2:]
    for name, tensor in weights(tmp_path / "run").items():
        if name.endswith(("down.weight", "output.weight")):
            assert tensor.norm() > 0.8 * before[name].norm(), name
    assert longer["val_loss"] < short["val_loss"]


@pytest.mark.full
@pytest.mark.parametrize("stages", ["1", "2"])
def test_a_worker_killed_between_meetings_leaves_equal_weights(config, tmp_path, stages):
    """Replicas train alone for six steps; one is lost at its fourth, while the other may be anywhere."""
    words = (
        *GRID,
        "--pipeline.stages",
        stages,
        "--replicas.exchange",
        "local:steps=6,momentum=0.5",
        "--train.steps",
        "12",
        "--train.checkpoint_every",
        "1",
    )
    calm = train(config, tmp_path / "calm", *words)
    command = ["--config", config, "--run", str(tmp_path / "run"), *words]
    faults = [Fault(0, "forward", 2 * 9, replica=1), Fault(0, "forward", 2 * 3)]
    heard: list[tuple[int, dict]] = []
    disturbed = train_with(command, faults, tmp_path / "struck", heard)
    assert sum("lost" in message for _, message in heard) == 2
    assert disturbed["weights_sha256"] == calm["weights_sha256"]


@pytest.mark.parametrize("method", ["allreduce", pytest.param("local:steps=3", marks=pytest.mark.full)])
def test_a_grid_that_is_asked_to_end_goes_on_with_the_same_bits(config, tmp_path, capsys, method):
    words = ["--config", config, "--train.threads", "1", *GRID, "--replicas.exchange", method, "--train.steps", "16"]
    words += ["--train.checkpoint_every", "6", "--train.validate_every", "0"]
    whole = train(config, tmp_path / "whole", *words[4:])
    hold, struck = Fault(0, "forward", 2 * 9, "hold"), tmp_path / "struck"

    def terminate() -> None:
        wait_until((struck / f"struck-{hold.name}").exists)
        os.kill(os.getpid(), signal.SIGTERM)
        (struck / GO).touch()

    threading.Thread(target=terminate, daemon=True).start()
    assert command_with(["--run", str(tmp_path / "run"), *words], [hold], struck) == 0
    assert int(re.search(r"stopped at step (\d+)", capsys.readouterr().out)[1]) in (8, 9)
    resumed = train(config, tmp_path / "run", "--resume", *words[4:])
    assert resumed["steps"] == 16 and resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--replicas.count", "2", "--memory.budget", "1GB"), "what an exchange keeps and sends is not planned for"),
        (("--replicas.count", "3", "--train.batch", "8"), "replicas.count is 3, which does not divide train.batch 8"),
        (("--replicas.count", "4", "--train.batch", "8", "--replicas.graph", "0-1,2-3"), "not connected"),
        (("--replicas.count", "3", "--train.batch", "6", "--replicas.graph", "0-1:0.7,1-2:0.7"), "not doubly stochastic"),
        (("--replicas.count", "2", "--replicas.exchange", "gossip"), "unknown exchange 'gossip'"),
        (("--replicas.count", "2", "--replicas.exchange", "powersgd:rank=0"), "rank"),
        (("--replicas.count", "2", "--pipeline.mode", "inprocess"), "add --pipeline.mode workers"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(config, tmp_path, capsys, words, reason):
    given = words if "--pipeline.mode" in words else (*words, "--pipeline.mode", "workers")
    assert cli.main(["train", "--config", config, "--run", str(tmp_path / "run"), "--pipeline.microbatches", "1", *given]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_state_that_is_missing_is_refused_by_name(config, tmp_path, capsys):
    words = (*GRID, "--replicas.exchange", "powersgd:rank=2")
    train(config, tmp_path / "run", *words)
    for folder in (tmp_path / "run").glob("**/checkpoints/step-000006"):
        shutil.rmtree(folder)
    folder = tmp_path / "run/checkpoints/step-000004"
    path = folder / "stage-0.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.startswith("exchange/")}, path)
    manifest = json.loads((folder / "stage-0.json").read_text())
    manifest |= {"sha256": checkpoint.file_sha256(path), "bytes": path.stat().st_size}
    (folder / "stage-0.json").write_bytes(checkpoint.encode_manifest(manifest))
    assert cli.main(["train", "--config", config, "--run", str(tmp_path / "run"), *words, "--resume"]) == 2
    assert "powersgd" in capsys.readouterr().err
