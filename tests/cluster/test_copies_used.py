"""Two machines with two stages: when the run has ended, each has the whole model and can use it alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.test_backups import opened
from cluster.test_join import join_words, loopback
from jobs import command
from runs import train
from thinwire import checkpoint
from thinwire.cli import main as cli
from thinwire.link.errors import ProtocolError
from thinwire.run.last import packed, share_tokenizer

WORDS = ("--train.steps", "9", "--train.checkpoint_every", "1", "--train.validate_every", "0")


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/stage-*"))


def run_apart(pool, config, tmp_path: Path, stages: int, *words: str) -> list[Path]:
    """Train with each stage on a machine of its own; return their folders."""
    homes = loopback(tmp_path, stages)
    jobs = [(join_words(home, stage, config, "--pipeline.stages", str(stages), *WORDS, *words),) for stage, home in enumerate(homes)]
    results = pool.run(command, jobs)
    assert [code for code, _, _ in results] == [0] * stages, results
    return homes


@pytest.fixture(scope="module")
def apart(tmp_path_factory, pool, token_cache):
    """Two machines after a finished run, on a line on which copies are always late; and the same run in one folder."""
    from runs import write_config

    folder = tmp_path_factory.mktemp("apart")
    config = write_config(folder, token_cache)
    alone = folder / "alone"
    train(config, alone, *WORDS)
    return alone, run_apart(pool, config, folder, 2, "--link.profile", "2mbps_2ms")


def kept(run: Path) -> list[str]:
    return [path.name for path in checkpoint.steps(run)]


def test_the_newest_two_that_all_have_stay_and_the_neighbour_has_the_last(apart):
    assert kept(apart[1][0] / "run") == kept(apart[1][1] / "run")
    for stage, home in enumerate(apart[1]):
        assert len(kept(home / "run")) == 2 and kept(home / "run")[-1] == "step-000009"
        assert len(names(home / "run/checkpoints")) == 4
        assert names(home / "run/copies") == [f"step-000009/stage-{1 - stage}.{ending}" for ending in ("json", "safetensors")]
        copied, own = (
            folder / f"step-000009/stage-{1 - stage}.safetensors"
            for folder in (home / "run/copies", apart[1][1 - stage] / "run/checkpoints")
        )
        assert copied.read_bytes() == own.read_bytes()
        assert (home / "run/tokenizer.json").read_bytes() == (apart[0] / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("stage", [0, 1])
def test_each_machine_exports_generates_and_evaluates_the_whole_model(apart, tmp_path, capsys, stage):
    alone, run = apart[0], apart[1][stage] / "run"
    outputs = {}
    for folder in (alone, run):
        capsys.readouterr()
        assert cli.main(["export", str(folder), str(tmp_path / folder.name), "--sequences", "4"]) == 0
        exported = capsys.readouterr().out.replace(str(tmp_path / folder.name), "")
        assert cli.main(["generate", str(folder), "--prompt", "5 plus", "--max-new-tokens", "9", "--seed", "1"]) == 0
        text = capsys.readouterr().out
        assert (
            cli.main(["generate", str(folder), "--prompt", "5 plus", "--max-new-tokens", "9", "--seed", "1", "--pipeline.mode", "workers"])
            == 0
        )
        assert capsys.readouterr().out == text
        assert cli.main(["eval", str(folder), "--sequences", "8"]) == 0
        outputs[folder] = (exported, text, json.loads(capsys.readouterr().out))
    assert outputs[alone] == outputs[run] and outputs[run][2]["step"] == 9
    weights, config = ("model.safetensors", "config.json")
    for name in (weights, config, "tokenizer.json"):
        assert (tmp_path / run.name / name).read_bytes() == (tmp_path / alone.name / name).read_bytes(), name


def test_a_damaged_copy_and_one_of_another_run_are_refused(apart, tmp_path, capsys):
    run = shutil.copytree(apart[1][0] / "run", tmp_path / "run")
    tensors = run / "copies/step-000009/stage-1.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    for words in (["export", str(run), str(tmp_path / "out")], ["eval", str(run)], ["generate", str(run), "--prompt", "1"]):
        assert cli.main(words) == 2
        assert f"{tensors} does not match the sha256 in its manifest: it is damaged" in capsys.readouterr().err
    data[-1] ^= 1
    tensors.write_bytes(data)
    path = tensors.with_suffix(".json")
    manifest = json.loads(path.read_bytes())
    for name in ("settings", "config"):  # earlier releases wrote the latter
        path.write_bytes(checkpoint.encode_manifest(manifest | {name: "0" * 64}))
        for words in (["export", str(run), str(tmp_path / "out")], ["eval", str(run)]):
            assert cli.main(words) == 2
            assert f"differ in {name}; copy the parts of one run together" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [0, 1])
def test_a_fork_takes_the_other_stage_from_its_copy(apart, tmp_path, capsys, stage):
    """On either machine: the whole model stands at step 9, and the new run goes on from there."""
    new, run = tmp_path / "new", apart[1][stage] / "run"
    words = ["--train.steps", "10", "--pipeline.mode", "inprocess", "--link.profile", "open"]
    assert cli.main(["train", "--from", str(run), "--run", str(new), *words]) == 0
    assert "step 10/10" in (said := capsys.readouterr().out) and "step 1/" not in said
    assert names(new / "checkpoints")[:4] == [f"step-000009/stage-{each}.{end}" for each in (0, 1) for end in ("json", "safetensors")]


def test_parts_of_two_seeds_are_not_used_together(config, tmp_path, capsys):
    """Without a basis nothing else that the parts say would tell them apart."""
    runs = [tmp_path / "run", tmp_path / "other"]
    for seed, run in enumerate(runs):
        train(config, run, "--codec.name", "dense", "--train.steps", "2", "--seed", str(seed))
    for path in (runs[1] / "checkpoints/step-000002").glob("stage-1.*"):
        shutil.copy(path, runs[0] / "checkpoints/step-000002")
    for words in (["export", str(runs[0]), str(tmp_path / "out")], ["eval", str(runs[0])]):
        assert cli.main(words) == 2
        assert "differ in settings; copy the parts of one run together" in capsys.readouterr().err


def test_an_older_whole_checkpoint_is_used_with_a_note(apart, tmp_path, capsys):
    run = shutil.copytree(apart[1][0] / "run", tmp_path / "run")
    older = kept(run)[0]
    shutil.rmtree(run / "copies")
    shutil.copytree(apart[1][1] / "run/checkpoints" / older, run / "copies" / older)
    assert cli.main(["eval", str(run), "--sequences", "4"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["step"] == int(older[-6:])
    assert f"this is step {int(older[-6:])}; of step 9 not all stages are in" in captured.err


def test_without_the_tokenizer_of_stage_0_nothing_is_made_up(apart, tmp_path, capsys):
    run = shutil.copytree(apart[1][1] / "run", tmp_path / "run")
    (run / "tokenizer.json").unlink()
    for words in (["eval", str(run)], ["generate", str(run), "--prompt", "1"]):
        assert cli.main(words) == 2
        assert "stage 0 of this run is on another machine" in capsys.readouterr().err
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "note: without a tokenizer" in said and "not measured" in said


def test_of_three_stages_what_is_missing_is_named(pool, config, tmp_path, capsys):
    homes = run_apart(pool, config, tmp_path, 3)
    folders = [kept(home / "run") for home in homes]
    assert folders[0] == folders[1] == folders[2] and len(folders[0]) == 2 and folders[0][-1] == "step-000009"
    assert (
        cli.main(["export", str(homes[1] / "run"), str(tmp_path / "out")]) == 0
    )  # the one in the middle keeps what the last one needs too
    assert cli.main(["eval", str(homes[2] / "run")]) == 2
    assert "lacks stages 0; copy their files stage-N.* from the same folder" in capsys.readouterr().err


def test_a_neighbour_that_cannot_send_is_not_waited_for(tmp_path):
    """Its part was deleted, or its disk fails: the others end without that copy."""
    from link.support import World, pair

    with pair(World(tmp_path)) as (left, right, _):
        first, second = opened(tmp_path / "first", 0, 2, None, left, 1000), opened(tmp_path / "second", 1, 2, right, None, 1000)
        assert not first.send("step-000009")
        second.wait_for_copies("step-000009", [])
        assert second.copied((9,)) == ()
        for each in (left, right, first, second):
            each.close()


@pytest.mark.parametrize("mode", ["inprocess", "workers"])
def test_on_one_machine_the_newest_two_stay(config, tmp_path, mode):
    train(config, tmp_path / "run", *WORDS, "--pipeline.mode", mode)
    assert len(kept(tmp_path / "run")) == 2 and kept(tmp_path / "run")[-1] == "step-000009"


def test_a_tokenizer_that_is_none_is_the_peers_fault_and_a_folder_that_takes_none_is_not(apart, tmp_path, capsys):
    """What cannot be read is no matter of this machine's disk; what cannot be written is, and says what helps."""
    tokenizer = apart[0] / "tokenizer.json"
    good = packed(tokenizer.read_text(encoding="utf-8"))

    def share(parts: list[str], folder: Path) -> None:
        group = SimpleNamespace(announce=lambda told, form: {"tokenizer": parts})
        share_tokenizer(SimpleNamespace(data=None, has_first=False, group=group, folder=folder))

    with pytest.raises(ProtocolError, match="frame refused: tokenizer is"):
        share(packed("{}"), tmp_path)
    assert not (tmp_path / "tokenizer.json").exists() and not capsys.readouterr().err
    share(good, tmp_path / "gone")
    error = capsys.readouterr().err
    assert f"{tmp_path / 'gone/tokenizer.json'} was not written: No such file or directory; {tmp_path} has " in error
    share(good, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
