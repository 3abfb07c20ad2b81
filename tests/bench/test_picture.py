"""The README's picture says what the scoreboard says."""

from __future__ import annotations

import re
from pathlib import Path

import picture

BOARD = (Path(__file__).parents[2] / "docs" / "scoreboard.md").read_text().partition("## 1-final")[2].partition("## 2-")[0]


def test_times_to_the_target_are_those_of_the_board(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["picture.py", "--out", str(tmp_path / "picture.png")])
    picture.main()
    said = dict(re.findall(r"^(\S+): ([\d,]+) s to 4\.402$", capsys.readouterr().out, re.MULTILINE))
    assert len(said) == len(picture.SIDES) == 4
    for name, seconds in said.items():
        (row,) = [line for line in BOARD.splitlines() if line.startswith("|") and re.sub(r"[:,]|=", "", cell(line)) == plain(name)]
        assert f" {seconds} |" in row, name
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def cell(line: str) -> str:
    return line.split("|")[1].strip()


def plain(name: str) -> str:
    return name.replace("-", "")
