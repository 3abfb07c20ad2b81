"""Run folders, rosters and keys that an earlier version wrote go on working, to the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from thinwire.cli import main as cli
from thinwire.cluster.places import read_places
from thinwire.link.identity import fingerprint, load_identity
from thinwire.link.peer import WorkerId
from thinwire.link.roster import read_roster

EARLIER = Path(__file__).parent / "fixtures" / "earlier"
EXPECTED = json.loads((EARLIER / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_of_before_goes_on_to_the_same_weights(name, tmp_path):
    run = tmp_path / name
    shutil.copytree(EARLIER / "runs" / name, run)
    for config in run.rglob("config.toml"):
        text = config.read_text().replace("@TEXT@", str(EARLIER / "text.txt")).replace("@CACHE@", str(tmp_path / "cache"))
        config.write_text(text)
    cli.main(["train", "--run", str(run), "--resume", "--train.steps", "7"])
    assert json.loads((run / "summary.json").read_text())["weights_sha256"] == EXPECTED[name]


def test_a_roster_of_before_names_the_same_run_and_its_taken_places():
    roster = read_roster(EARLIER / "roster.toml")
    assert roster.run_name == "4f28a69c9e0010d0"
    places = read_places(roster, EARLIER / "taken")
    assert places.worker(WorkerId(0, 0)).certificate == roster.standbys[0].certificate


def test_the_number_of_a_process_of_before_is_grown_from(monkeypatch, tmp_path):
    """An earlier version kept it with the checkpoints, one file for each stage."""
    roster, folder = read_roster(EARLIER / "roster.toml"), EARLIER / "runs" / "workers"
    monkeypatch.setattr("time.time_ns", lambda: 5_000)  # the clock went back
    newest = max(int((folder / "checkpoints" / f"incarnation-{stage}").read_text()) for stage in (0, 1))
    assert newest > 10**15
    assert read_places(roster, folder).incarnation == newest + 1
    (tmp_path / "checkpoints").mkdir()
    for name, text in (("1", ""), ("2", "x"), ("3", "9" * 60), ("4", "1" * 100)):
        (tmp_path / "checkpoints" / f"incarnation-{name}").write_text(text)
    assert read_places(roster, tmp_path).incarnation == 5  # what is damaged is no number


def test_keys_of_before_are_those_of_the_roster(tmp_path):
    roster = read_roster(EARLIER / "roster.toml")
    for name, stage in (("a", 0), ("b", 1)):
        folder = tmp_path / name
        shutil.copytree(EARLIER / "keys" / name, folder)
        (folder / "key.pem").chmod(0o600)
        assert fingerprint(load_identity(folder).certificate) == fingerprint(roster.workers[WorkerId(0, stage)].certificate)
