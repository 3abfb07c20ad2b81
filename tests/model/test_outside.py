"""An architecture from outside the package, one file and one entry point: it trains, resumes, is exported and imported, obeys the laws."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from patience import HANG
from runs import train
from thinwire import checkpoint
from thinwire.cli import main as cli
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.hf.checkpointed import open_checkpoint
from thinwire.model.subspace.basis import distance_outside
from thinwire.pipeline import by_stage
from thinwire.pipeline.inprocess import build_pipeline

HERE = Path(__file__).parent
WORDS = ("--model.architecture", "gelu", "--model.kv_heads", "4", "--train.dtype", "fp64")
CODECS = {"subspace": ("--codec.rank", "6", "--codec.drift_every", "2"), "dense": ("--codec.name", "dense")}


@pytest.fixture(autouse=True)
def installed(tmp_path_factory, monkeypatch) -> Path:
    """Put the file and its entry points where this process and its workers find packages."""
    folder = tmp_path_factory.mktemp("packages")
    shutil.copy(HERE / "gelu_decoder.py", folder)
    facts = folder / "gelu_decoder-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: gelu-decoder\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[thinwire.architectures]\ngelu = gelu_decoder:Gelu\nbare = gelu_decoder:Bare\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    return folder


@pytest.mark.parametrize("codec", CODECS)
def test_it_trains_alike_in_one_process_and_in_workers_and_resumes(config, tmp_path, codec):
    words = (*WORDS, *CODECS[codec])
    whole = train(config, tmp_path / "whole", *words)
    workers = train(config, tmp_path / "workers", *words, "--pipeline.mode", "workers")
    assert workers["weights_sha256"] == whole["weights_sha256"] and workers["model_sha256"] == whole["model_sha256"]
    train(config, tmp_path / "resumed", *words, "--train.steps", "6")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-000006")
    assert [folder.name for folder in checkpoint.complete(tmp_path / "resumed")][-1:] == ["step-000004"]
    resumed = train(config, tmp_path / "resumed", *words, "--resume")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert 'architecture = "gelu"' in (tmp_path / "whole" / CONFIG_FILE).read_text()
    assert whole["final_loss"] < 5.6  # ln 300 is 5.70


def test_what_it_writes_lies_in_the_subspace(config, tmp_path):
    """Every constrained block, on the D-wide stream of the trained network, adds nothing outside of U."""
    train(config, tmp_path / "run", *WORDS, *CODECS["subspace"])
    pipeline = build_pipeline(read_config(tmp_path / "run" / CONFIG_FILE), torch.device("cpu"))
    checkpoint.load_stages(checkpoint.newest(tmp_path / "run", 2), pipeline.stages, None, {})
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    from safetensors.torch import load_file

    plain, basis_DK = load_file(tmp_path / "out" / "model.safetensors"), pipeline.stages[0].stream.basis()
    constrained = range(pipeline.stages[0].constrained)
    for layer in constrained:
        assert distance_outside(plain[f"decoder.{layer}.mixed_to_stream"], basis_DK) < 1e-14
        assert distance_outside(plain[f"decoder.{layer}.hidden_to_stream.weight"].T, basis_DK) < 1e-14
    assert len(constrained) == 2 and distance_outside(plain["decoder.3.hidden_to_stream.weight"].T, basis_DK) > 0.1


def plain_loss(run: Path) -> float:
    """Return the loss of a run's network without the rounding at its boundaries."""
    source = open_checkpoint(run)
    ids_NT1 = torch.randint(0, 300, (4, 17), generator=torch.Generator().manual_seed(0))
    return by_stage.evaluate_by_stage(source.config, ids_NT1, source.fill, step=source.step, boundaries=False)


@pytest.mark.parametrize("codec", CODECS)
def test_it_goes_out_as_a_hugging_face_folder_and_comes_back(config, tmp_path, codec, capsys):
    train(config, tmp_path / "run", *WORDS, *CODECS[codec])
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "first")]) == 0
    table = json.loads((tmp_path / "first" / "config.json").read_text())
    assert table["architectures"] == ["GeluDecoderForCausalLM"] and table["wide"] == 32
    assert "is a plain Hugging Face GELU decoder folder" in capsys.readouterr().out
    words = ["import", str(tmp_path / "first"), "--run", str(tmp_path / "again"), "--config", config, "--train.dtype", "fp64"]
    assert cli.main(words) == 0
    again = read_config(tmp_path / "again" / CONFIG_FILE)
    assert again.model.architecture == "gelu" and again.codec.name == "dense"
    assert plain_loss(tmp_path / "again") == pytest.approx(plain_loss(tmp_path / "run"), rel=1e-12)
    assert cli.main(["export", str(tmp_path / "again"), str(tmp_path / "second")]) == 0
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_projecting_it_back_into_the_subspace_loses_nothing_that_lay_in_it(config, tmp_path):
    """Through the matrix that lies the other way round as well: the energy that U holds is all there is but for the embedding's."""
    train(config, tmp_path / "run", *WORDS, "--codec.rank", "32", "--codec.fixed_scale", "0.5")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    words = ["import", str(tmp_path / "out"), "--run", str(tmp_path / "again"), "--config", config, "--train.dtype", "fp64"]
    assert cli.main([*words, "--codec.name", "subspace", "--codec.rank", "32", "--codec.fixed_scale", "0.5", "--project"]) == 0
    assert plain_loss(tmp_path / "again") == pytest.approx(plain_loss(tmp_path / "run"), rel=1e-12)


def test_what_it_does_not_declare_is_refused_by_name(config, tmp_path, capsys):
    bare = ("--model.architecture", "bare", "--model.kv_heads", "4")
    subnets = (*bare, "--replicas.count", "2", "--replicas.exchange", "ist", "--pipeline.mode", "workers")
    assert cli.main(["train", "--config", config, "--run", str(tmp_path / "subnets"), *subnets]) != 0
    assert "the architecture 'bare' declares no units" in capsys.readouterr().err
    train(config, tmp_path / "run", *bare)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--sequences", "0"]) == 0
    assert "the architecture 'bare' declares no Hugging Face form" in capsys.readouterr().out
    assert not (tmp_path / "out" / "config.json").exists()
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--resume", "--model.architecture", "gelu", "--train.steps", "8"]) != 0
    assert "model.architecture" in capsys.readouterr().err
    for words, reason in (
        (("--model.output_bias",), "model.output_bias is True, which a GELU decoder does not have"),
        (("--model.kv_heads", "2"), "model.kv_heads is 2; set it to model.heads 4"),
        (("--model.architecture", "gleu"), "unknown architecture 'gleu'; did you mean gelu?"),
    ):
        assert cli.main(["train", "--config", config, "--run", str(tmp_path / "no"), *WORDS, *words]) != 0
        assert reason in capsys.readouterr().err


@pytest.mark.full
def test_it_obeys_the_laws():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "gelu or bare or accepts"]
    result = subprocess.run([*command, str(HERE / "test_architectures.py")], capture_output=True, text=True, timeout=HANG, env=os.environ)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout
