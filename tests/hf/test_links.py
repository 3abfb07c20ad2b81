"""Files that links lead to: none outside the folder is read or copied, those of the Hugging Face cache are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hf.support import bring_in, export, our_logits, some_ids
from thinwire.cli import main as cli

SECRET = "what is nobody's business"
COPIED = ("tokenizer_config.json", "vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja", "added_tokens.json")


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    """Return a copy of the folder that no list of hashes vouches for."""
    copy = shutil.copytree(folder, tmp_path / "copied")
    (copy / "thinwire.json").unlink()
    return copy


def link_out(path: Path) -> None:
    """Put a link to the same file, or to a secret, elsewhere in the place of a file."""
    outside = path.parent.parent / f"outside-{path.name}"
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text(SECRET)
    path.symlink_to(outside)


def refused(words: list[str], name: str, capsys) -> bool:
    """Tell whether a command is refused because of a link of this name."""
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    return f"{name} is a link to " in error and "was not read" in error and ", outside " in error


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model-00002-of-00007.safetensors", "model.safetensors.index.json", *COPIED]
)
def test_import_follows_no_link_out_of_the_folder(settings_file, copied, tmp_path, capsys, name):
    link_out(copied / name)
    assert refused(["import", str(copied), "--run", str(tmp_path / "run"), "--config", settings_file], name, capsys)
    assert not (tmp_path / "run").exists()


def test_a_listed_file_and_a_folder_that_lead_out_are_refused(settings_file, folder, copied, tmp_path, capsys):
    words = ["import", str(copied), "--run", str(tmp_path / "run"), "--config", settings_file]
    index = copied / "model.safetensors.index.json"
    (tmp_path / "elsewhere").mkdir()
    shutil.move(copied / "model-00002-of-00007.safetensors", tmp_path / "elsewhere/model-00002-of-00007.safetensors")
    (copied / "sub").symlink_to(tmp_path / "elsewhere")
    index.write_text(index.read_text().replace("model-00002-of-00007", "sub/model-00002-of-00007"))
    assert refused(words, "sub/model-00002-of-00007.safetensors", capsys)
    listed = shutil.copytree(folder, tmp_path / "listed")
    table = json.loads((listed / "thinwire.json").read_text())
    (tmp_path / "secret").write_text(SECRET)
    (listed / "notes.txt").symlink_to(tmp_path / "secret")
    table["files"]["notes.txt"] = "0" * 64
    (listed / "thinwire.json").write_text(json.dumps(table))
    assert refused([*words[:1], str(listed), *words[2:]], "notes.txt", capsys)


@pytest.mark.parametrize("name", ["vocab.json", "generation_config.json"])
def test_export_publishes_nothing_that_an_imported_run_links_to(settings_file, folder, tmp_path, capsys, name):
    run = bring_in(settings_file, folder, tmp_path / "run")
    link_out(run / "imported" / name)
    assert refused(["export", str(run), str(tmp_path / "out"), "--sequences", "0"], f"imported/{name}", capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("codec, name", [("subspace", "tokenizer.json"), ("bottleneck", "tokenizer.json"), ("bottleneck", "summary.json")])
def test_export_publishes_nothing_that_a_run_links_to(config, tmp_path, capsys, codec, name):
    run = tmp_path / "run"
    assert cli.main(["train", "--config", config, "--run", str(run), "--codec.name", codec, "--train.steps", "1"]) == 0
    link_out(run / name)
    assert refused(["export", str(run), str(tmp_path / "out"), "--sequences", "0"], name, capsys)
    assert not (tmp_path / "out").exists()


def test_links_inside_the_folder_are_followed(settings_file, run, copied, tmp_path):
    (copied / "tokenizer.json").rename(copied / "kept.json")
    (copied / "tokenizer.json").symlink_to("kept.json")
    (tmp_path / "name").symlink_to(copied)  # a person may name the folder by a link
    assert (bring_in(settings_file, tmp_path / "name", tmp_path / "run") / "tokenizer.json").is_file()


@pytest.mark.parametrize("shared", [False, True], ids=["blobs of the model", "store of all models"])
def test_a_snapshot_of_the_hugging_face_cache_is_read_as_it_is(settings_file, run, folder, tmp_path, capsys, shared):
    model = tmp_path / "hub/models--someone--small"
    snapshot, blobs = model / "snapshots/0123abcd", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{number:040x}"
        shutil.copyfile(path, blob)
        if shared and path.suffix == ".safetensors":
            store = tmp_path / "hub/blobs/ab" / f"ab{number:062x}"
            store.parent.mkdir(parents=True, exist_ok=True)
            blob.rename(store)
            blob.symlink_to(os.path.relpath(store, blobs))
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    again = bring_in(settings_file, snapshot, tmp_path / "run")
    difference = our_logits(again, some_ids()) - our_logits(run, some_ids())
    assert float(difference.abs().max()) < 1e-4
    export(again, tmp_path / "out")
    other = tmp_path / "hub/models--someone--else/blobs/0"
    other.parent.mkdir(parents=True)
    other.write_text(SECRET)
    (snapshot / "vocab.json").symlink_to(other)
    assert refused(["import", str(snapshot), "--run", str(tmp_path / "no"), "--config", settings_file], "vocab.json", capsys)
