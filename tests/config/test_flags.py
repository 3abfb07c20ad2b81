"""Switches of the command line, said as a file says them."""

from __future__ import annotations

import pytest

from thinwire.config.command_line import as_flags
from thinwire.run.command import parse_train

SWITCHES = {"codec.entropy", "model.tied_head"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("--codec.entropy true", "--codec.entropy"),
        ("--codec.entropy false --seed 1", "--codec.no_entropy --seed 1"),
        ("--codec.entropy --seed 1", "--codec.entropy --seed 1"),
        ("--model.tied-head true", "--model.tied_head"),
        ("--codec.name true --codec.entropy true", "--codec.name true --codec.entropy"),
        ("true --seed 1", "true --seed 1"),
    ],
)
def test_true_and_false_become_flags(given, wanted):
    assert as_flags(given.split(), SWITCHES) == wanted.split()


@pytest.mark.parametrize(("words", "found"), [(["true"], True), ([], True), (["false"], False)])
def test_both_forms_mean_the_same(words, found):
    assert parse_train(["--data.everywhere", *words]).config.data.everywhere is found
