"""The README: first command early, every train command parses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from thinwire.cli.main import VERBS
from thinwire.run.command import parse_train

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if re.match(r"^    thinwire ", line)]


def test_first_command_stands_before_line_15():
    first = next(number for number, line in enumerate(README.splitlines(), 1) if re.match(r"^\s*(make|thinwire|pip) ", line))
    assert first < 15


def test_no_placeholder_is_left():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert not re.search(r"^[A-Z]{4,}$", path.read_text(), re.MULTILINE), path


def test_linked_files_exist():
    for target in re.findall(r"\]\((?!https|#)([^)]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verb, *words = shlex.split(command)[1:]
    assert verb in VERBS
    if verb == "train" and not {"--resume", "--from"} & {*words}:
        parse_train(words)
