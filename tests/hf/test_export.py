"""`thinwire export`: the folder computes what the run computes, loads in transformers, and is whole or absent."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from helpers import relative
from hf.support import bring_in, export, load_pipeline, our_logits, plug_in, some_ids, their_logits, train_run
from runs import train
from thinwire import checkpoint
from thinwire.checkpoint.safetensors import Piece
from thinwire.cli import main as cli
from thinwire.codecs.build import codec_defaults
from thinwire.config.registry import CODECS
from thinwire.config.toml import CONFIG_FILE, load_config
from thinwire.hf import export as verb
from thinwire.hf.plain import why_not_plain

CASES = {
    "subspace": (),
    "four stages, features hashed": ("--pipeline.stages", "4", "--codec.fixed_cache_mb", "0", "--codec.bits", "4"),
    "uneven": ("--pipeline.stages", "3", "--pipeline.split", "1,2,1", "--model.free_layers", "0"),
    "dense": ("--codec.name", "dense", "--train.dtype", "bf16"),
    "quantised": ("--codec.name", "quantize", "--codec.bits", "4"),
    "threshold": ("--codec.name", "threshold"),
    "output bias": ("--codec.name", "dense", "--model.output_bias", "--model.dropout", "0.1"),
    "tied head": ("--codec.name", "dense", "--model.tied_head"),
}


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_transformers_compute_our_logits(config, tmp_path, words):
    run = train_run(config, tmp_path / "run", "--model.norm_eps", "1e-4", "--model.rope_theta", "500", *words)
    out = export(run, tmp_path / "out", "--shard-size", "30KB")
    ours, theirs = our_logits(run, some_ids()), their_logits(out, some_ids())
    assert (ours - theirs).abs().max() < 1e-5 * ours.abs().max()
    if "output_bias" in " ".join(words):  # or the case proves nothing
        assert load_file(run / "checkpoints/step-000003/stage-0.safetensors")["layers.0.ffn.down.bias"].abs().max() > 0
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1 and (out / "model.safetensors.index.json").is_file()


def test_with_a_basis_that_has_moved(run, folder):
    assert json.loads((run / "checkpoints/step-000003/stage-1.json").read_text())["basis_version"] == 3
    ours, theirs = our_logits(run, some_ids()), their_logits(folder, some_ids())
    assert (ours - theirs).abs().max() < 1e-5 * ours.abs().max()


def test_in_fp64_our_own_plain_form_is_the_same_network(config, tmp_path):
    exact = ("--train.dtype", "fp64", "--codec.dtype", "fp64")
    run = train_run(config, tmp_path / "run", *exact, "--codec.drift_every", "1", "--codec.drift_rate", "0.5", "--pipeline.stages", "4")
    out = export(run, tmp_path / "out")
    plain = bring_in(config, out, tmp_path / "plain", *exact, "--pipeline.stages", "1")
    assert json.loads((out / "config.json").read_text())["dtype"] == "float64"
    ours = our_logits(run, some_ids(), boundaries=True)
    assert relative(our_logits(plain, some_ids()), ours) < 1e-12 and ours.dtype == torch.float64


def test_files_of_the_folder(run, tmp_path):
    out = export(run, tmp_path / "deep/er/out", "--dtype", "bf16")
    names = "README.md config.json generation_config.json model.safetensors special_tokens_map.json thinwire.json tokenizer.json"
    assert {path.name for path in out.iterdir()} == {*names.split(), "tokenizer_config.json"}
    about = json.loads((out / "config.json").read_text())
    assert (about["head_dim"], about["max_position_embeddings"], about["dtype"]) == (8, 16, "bfloat16")
    assert about["rope_theta"] == about["rope_parameters"]["rope_theta"] == 10000.0
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    contents = json.loads((out / "thinwire.json").read_text())
    assert contents["files"] == {path.name: checkpoint.file_sha256(path) for path in out.iterdir() if path.name != "thinwire.json"}
    assert (contents["step"], contents["codec"]["name"], contents["codec"]["rank"]) == (3, "subspace", 6)


def test_the_tokenizer_is_the_runs(run, folder):
    from transformers import AutoTokenizer

    from thinwire.data.tokenize import load_tokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(run / "tokenizer.json"))
    for text in ("12 plus 5 is 17, said the 2 of them.\n", "  zwei\tTabs — naïve 🙂", "a<|end|>b"):
        assert theirs.encode(text) == ours.encode(text).ids
        assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert theirs.eos_token_id == ours.token_to_id("<|end|>") and theirs.decode([theirs.eos_token_id], skip_special_tokens=True) == ""


def test_the_card_gives_the_loss_with_and_without_boundaries(config, tmp_path, capsys):
    run = train_run(config, tmp_path / "run", "--codec.name", "quantize", "--codec.bits", "2", "--train.rate", "0.1")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    card, said = (tmp_path / "out/README.md").read_text(), capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    trained = f"{summary['val_loss']:.4f}"
    assert f"| validation loss, boundaries as trained | {trained} (8 sequences) |" in card and trained in said
    plain = float(card.split("no boundary (the plain network) | ")[1].split()[0])
    assert plain != pytest.approx(summary["val_loss"], abs=1e-4) and f"{plain:.4f} without any boundary" in said
    assert card.startswith("---\nlibrary_name: transformers\n") and "quantize (dtype bf16, bits 2" in card
    assert f"{summary['bytes_per_token_forward']:.1f} forward" in card and "| tokens | 192 |" in card


def test_without_its_text_the_card_says_so(config, tmp_path):
    run = train_run(config, tmp_path / "run")
    (tmp_path / "text.txt").unlink()
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "| not measured: the run's text cannot be opened here (data.source" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    "words, reason",
    [
        (
            ("--codec.name", "anchored", "--codec.ngrams", "2"),
            "boundaries learn too, so they are layers of the network (codec 'anchored', entry",
        ),
        (("--codec.name", "bottleneck", "--codec.bits", "4"), "last block in front of a boundary writes only 16 of 32 channels"),
        (("--codec.name", "autoencoder", "--codec.from_layer", "2", "--pipeline.stages", "4"), "boundaries learn too"),
        (("--codec.name", "dense", "--model.branch_norm_gains"), "model.branch_norm_gains puts a norm"),
    ],
)
def test_another_network_becomes_a_folder_of_our_own(config, tmp_path, capsys, words, reason):
    run = train_run(config, tmp_path / "run", *words)
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    out, said = tmp_path / "out", capsys.readouterr().out
    assert reason in said and reason in (out / "README.md").read_text() and "not a plain Llama" in said
    assert not (out / "config.json").exists()
    assert not any("optimizer" in name for name in load_file(out / "checkpoints/step-000003/stage-0.safetensors"))
    first, second = load_pipeline(run), load_pipeline(out)
    assert checkpoint.weights_sha256(first.stages) == checkpoint.weights_sha256(second.stages)
    assert cli.main(["eval", str(out), "--sequences", "8"]) == 0
    assert cli.main(["import", str(out), "--run", str(tmp_path / "x")]) == 2
    assert "is a thinwire folder" in capsys.readouterr().err
    assert cli.main(["export", str(run), str(tmp_path / "other"), "--dtype", "bf16"]) == 2


def test_codecs_are_judged_by_what_they_build(config, monkeypatch):
    plug_in(monkeypatch)
    base = load_config(config)
    judged = {name: why_not_plain(replace(base, codec=codec_defaults(name))) for name in ("gained", "other", "counting")}
    assert "entry gain" in judged["gained"] and "OtherStream" in judged["other"] and judged["counting"] is None
    exact = {"dense", "subspace", "quantize", "topk", "randomk", "threshold", "hadamard", "lossless", "lowrank", "counting"}
    assert {name for name in CODECS.names() if why_not_plain(replace(base, codec=codec_defaults(name))) is None} >= exact
    alone = replace(base, pipeline=replace(base.pipeline, stages=1))
    assert why_not_plain(replace(alone, codec=codec_defaults("bottleneck"))) is None  # no boundary, nothing narrows


def test_a_step_can_be_chosen(run, tmp_path, capsys):
    out = export(run, tmp_path / "out", "--step", "2")
    assert json.loads((out / "thinwire.json").read_text())["step"] == 2
    assert cli.main(["export", str(run), str(tmp_path / "no"), "--step", "7"]) == 2
    assert "no complete checkpoint of step 7; it has 2, 3: choose" in capsys.readouterr().err


def fail_late(error):
    def write_card(*arguments, **words):
        raise error

    return write_card


@pytest.mark.parametrize("error", [ValueError("full"), OSError("full"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["card", "rows"])
def test_no_half_written_folder_is_left(run, tmp_path, monkeypatch, error, place):
    before = sorted(path.name for path in tmp_path.iterdir())
    if place == "card":
        monkeypatch.setattr(verb, "write_card", fail_late(error))
    else:
        chunks = Piece.chunks

        def broken(self):
            yield from chunks(self)
            if self.name == "model.norm.weight":
                raise error

        monkeypatch.setattr(Piece, "chunks", broken)
    with pytest.raises(type(error)):
        verb.export(verb.ExportCommand(run=run, out=tmp_path / "new/out", sequences=0))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_refusals(run, tmp_path, capsys):
    (tmp_path / "there").mkdir()

    def refused(*words: str) -> str:
        assert cli.main(["export", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert f"{tmp_path / 'there'} exists and is not overwritten" in refused(run, tmp_path / "there")
    assert "--shard-size is 'two'; give a number" in refused(run, tmp_path / "out", "--shard-size", "two")
    assert "--sequences is -1" in refused(run, tmp_path / "out", "--sequences", "-1")
    assert "is not a run folder" in refused(tmp_path / "there", tmp_path / "out")
    assert "Hugging Face folder, not a run folder" in refused(export(run, tmp_path / "plain"), tmp_path / "out")
    shutil.copytree(run, tmp_path / "bad")
    path = tmp_path / "bad/checkpoints/step-000003/stage-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert "stage-1.safetensors does not match the sha256" in refused(tmp_path / "bad", tmp_path / "out")
    text = (tmp_path / "bad" / CONFIG_FILE).read_text()
    (tmp_path / "bad" / CONFIG_FILE).write_text(text.replace("rank = 6", "rank = 5"))
    assert "stream.basis_DK is (32, 6) float32 there, (32, 5) float32 by config.toml" in refused(
        tmp_path / "bad", tmp_path / "out", "--step", "2", "--sequences", "0"
    )
    assert not (tmp_path / "out").exists()


def test_a_format_that_cannot_hold_the_weights_is_refused():
    large = Piece("x", (2,), torch.float16, lambda start, stop: torch.tensor([1.0, 1e6]))
    with pytest.raises(ValueError, match=r"x has values that torch.float16 cannot hold; choose another --dtype"):
        list(large.chunks())


def test_the_running_mean_goes_out_and_a_resume_keeps_it(settings_file, run, tmp_path):
    words = ("--train.ema", "0.5", "--codec.name", "dense", "--train.decay", "0", "--train.validate_every", "0")
    whole, half = train_run(settings_file, tmp_path / "whole", *words), tmp_path / "half"
    train(settings_file, half, *words, "--train.steps", "2")
    train(settings_file, half, *words, "--train.steps", "3", "--resume")
    means = [load_file(export(each, each.with_name(f"{each.name}-mean"), "--ema") / "model.safetensors") for each in (whole, half)]
    plain = load_file(export(whole, tmp_path / "plain") / "model.safetensors")
    assert all(torch.equal(means[0][name], means[1][name]) for name in plain)
    assert any(not torch.equal(means[0][name], plain[name]) for name in plain)
    assert cli.main(["export", str(run), str(tmp_path / "none"), "--ema"]) != 0 and not (tmp_path / "none").exists()
