"""`thinwire import`: the same weights, a run that trains on, and the way back byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from hf.support import bring_in, export, load_pipeline, our_logits, same_bytes, some_ids, their_logits, train_run
from thinwire import checkpoint
from thinwire.cli import main as cli
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.data.open import open_data
from thinwire.hf import importing

CASES = {
    "dense": (),
    "one stage, bf16 weights": ("--pipeline.stages", "1"),
    "four stages, four bits": ("--pipeline.stages", "4", "--codec.name", "quantize", "--codec.bits", "4"),
}


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_there_and_back_again_gives_the_same_bytes(settings_file, run, tmp_path, words):
    chosen = ("--shard-size", "30KB", "--dtype", "bf16" if "1" in words else "fp32")
    first = export(run, tmp_path / "first", *chosen)
    second = export(bring_in(settings_file, first, tmp_path / "again", *words), tmp_path / "second", *chosen[:2])
    same_bytes(first, second, "README.md", "thinwire.json")


@pytest.mark.parametrize("words", [("--model.output_bias",), ("--model.tied_head",)], ids=["output bias", "tied head"])
def test_options_of_the_network_come_back_too(config, tmp_path, words):
    run = train_run(config, tmp_path / "run", "--codec.name", "dense", *words)
    first = export(run, tmp_path / "first")
    again = bring_in(config, first, tmp_path / "again")
    same_bytes(first, export(again, tmp_path / "second"), "README.md", "thinwire.json")
    assert torch.equal(our_logits(run, some_ids()), our_logits(again, some_ids()))


def test_the_run_trains_on_from_the_imported_weights(settings_file, folder, tmp_path, capsys):
    run = bring_in(settings_file, folder, tmp_path / "run", "--train.batch", "8")
    said = capsys.readouterr().out
    assert {path.name for path in run.iterdir()} == {"config.toml", "tokenizer.json", "checkpoints", "imported"}
    config, pipeline = read_config(run / CONFIG_FILE), load_pipeline(run)
    batch_BT1 = torch.from_numpy(open_data(config.data, config.model, config.seed).train.batch(0, 8))
    expected = pipeline.step(batch_BT1, 0, 0)
    assert f"validation loss {json.loads(evaluated(run, capsys))['loss']:.4f} through the boundaries of the run" in said
    assert cli.main(["train", "--run", str(run), "--resume"]) == 0
    lines = [json.loads(line) for line in (run / "metrics/stage-all.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[0]["loss"] == expected
    assert lines[-1]["loss"] < expected
    capsys.readouterr()
    out = export(run, tmp_path / "out")
    ours = our_logits(run, some_ids())
    assert (ours - their_logits(out, some_ids())).abs().max() < 1e-5 * ours.abs().max()
    assert "thinwire import FOLDER --run run" in (out / "README.md").read_text()


def evaluated(run: Path, capsys) -> str:
    capsys.readouterr()
    assert cli.main(["eval", str(run), "--sequences", "8"]) == 0
    return capsys.readouterr().out


def foreign_folder(path: Path, run: Path, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """Make a folder as transformers write it, with a tokenizer of ours."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 310, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": [0, 2], "bos_token_id": 5}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**shape | changes)).to(dtype)
    model.save_pretrained(path, max_shard_size="50KB")
    AutoTokenizer.from_pretrained(run).save_pretrained(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def test_a_folder_that_transformers_wrote(settings_file, folder, tmp_path):
    foreign = foreign_folder(tmp_path / "foreign", folder, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    run = bring_in(settings_file, foreign, tmp_path / "run", "--model.context", "16")
    theirs = their_logits(foreign, some_ids())
    assert (our_logits(run, some_ids()) - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert read_config(run / CONFIG_FILE).model.context == 16
    out = export(run, tmp_path / "out")
    assert torch.equal(their_logits(out, some_ids()), theirs)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (foreign / name).read_bytes(), name
    about = json.loads((out / "config.json").read_text())
    assert (about["max_position_embeddings"], about["eos_token_id"], about["bos_token_id"]) == (4096, [0, 2], 5)


def test_projection_of_a_model_from_that_subspace_is_the_model(settings_file, run, folder, tmp_path, capsys):
    subspace = ("--codec.name", "subspace", "--codec.rank", "6")
    assert cli.main(["import", str(folder), "--run", str(tmp_path / "no"), "--config", settings_file, *subspace]) == 2
    refusal = capsys.readouterr().err
    assert "6 of 32 directions, so the import would not be exact" in refusal and "add --project" in refusal
    projected = bring_in(settings_file, folder, tmp_path / "run", *subspace, "--project")
    said = capsys.readouterr().out
    assert "hold 100.0% of what" in said and "this is not exact" in said
    before = float(said.split("validation loss ")[1].split()[0])
    after = float(said.split("after projection: validation loss ")[1].split(", ")[1].split()[0])
    assert before == pytest.approx(after, abs=1e-3)
    ours = our_logits(run, some_ids())
    assert (our_logits(projected, some_ids()) - ours).abs().max() < 1e-4 * ours.abs().max()
    assert cli.main(["train", "--run", str(projected), "--resume"]) == 0


def test_projection_keeps_the_directions_in_which_most_is_written(settings_file, folder, tmp_path, capsys):
    words = ("--codec.name", "subspace", "--codec.fixed_scale", "1e-6", "--project")
    losses = {}
    for rank in (2, 32):
        run = bring_in(settings_file, folder, tmp_path / str(rank), *words, "--codec.rank", str(rank))
        said = capsys.readouterr().out
        before, after = (float(part.split()[0]) for part in (said.split("validation loss ")[1], said.split("boundaries of the run, ")[1]))
        losses[rank] = after - before
    # All directions hold everything, the features of size 1e-6 aside; two do not.
    assert abs(losses[32]) < 1e-3 < abs(losses[2])
    assert load_pipeline(run).stages[0].stream.basis_DK.shape == (32, 32)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--codec.name", "anchored"), "cannot be imported for the codec 'anchored': the boundaries learn too"),
        (("--codec.name", "bottleneck"), "writes only 16 of 32 channels"),
        (("--project",), "--project is for the codec subspace, but the codec is 'dense'"),
        (("--model.width", "64"), "model.width is 64, but the model in"),
        (("--pipeline.stages", "9"), "pipeline.stages is 9 for 4 layers"),
        (("--data.tokenizer", "x.json"), "the run uses the tokenizer of the folder"),
        (("--resume",), "an imported run is new"),
        (("--replicas.count", "2"), "replicas.count is 2, but an import writes the checkpoint of one replica"),
        (("--codec.rank", "3"), "the codec 'dense' has no option 'rank'"),
        (("--data.source", "none.txt"), "matches no file"),
    ],
)
def test_settings_that_do_not_go_are_refused(settings_file, folder, tmp_path, capsys, words, message):
    assert cli.main(["import", str(folder), "--run", str(tmp_path / "run"), "--config", settings_file, *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_exists_and_weights_that_would_be_rounded_are_refused(settings_file, folder, tmp_path, capsys):
    assert cli.main(["import", str(folder), "--run", str(tmp_path)]) == 2
    assert f"the run folder {tmp_path} exists" in capsys.readouterr().err
    wide = foreign_folder(tmp_path / "wide", folder, torch.float64, max_position_embeddings=16)
    words = ["import", str(wide), "--config", settings_file, "--run", str(tmp_path / "run")]
    assert cli.main(words) == 2
    assert "is torch.float64, but the run holds its weights in torch.float32" in capsys.readouterr().err
    assert cli.main([*words, "--train.dtype", "fp64", "--train.validation_sequences", "2"]) == 0


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()], ids=["OSError", "KeyboardInterrupt"])
def test_no_half_made_run_is_left(settings_file, folder, tmp_path, monkeypatch, error):
    save, saved = checkpoint.save_stage, []

    def failing(*arguments):
        if saved:
            raise error
        saved.append(save(*arguments))

    monkeypatch.setattr(importing.checkpoint, "save_stage", failing)
    with pytest.raises(type(error)):
        importing.import_folder(folder, tmp_path / "run", ["--config", settings_file])
    assert saved and not list(tmp_path.iterdir())


def test_without_a_tokenizer_one_must_be_named(settings_file, folder, tmp_path, capsys):
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    (bare / "thinwire.json").unlink()
    words = ["import", str(bare), "--run", str(tmp_path / "run"), "--config", settings_file]
    assert cli.main(words) == 2
    assert "has no tokenizer.json, and the model knows no other tokens" in capsys.readouterr().err
    assert cli.main([*words, "--data.tokenizer", str(folder / "tokenizer.json")]) == 0
    assert (tmp_path / "run/tokenizer.json").is_file()
