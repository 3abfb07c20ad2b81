"""What a peer says that cannot be so is never trained on: the run ends with a reason, and its last checkpoint is whole."""

from __future__ import annotations

import pytest

from faults.inject import Fault
from faults.support import refused_with, resumed

DIVERGED = "training has diverged and this step was not applied"
CASES = {
    # who, where, what; and what the message must say
    "nan gradient": (Fault(3, "backward", 9, "lie nan gradient"), DIVERGED),
    "infinite gradient": (Fault(2, "backward", 9, "lie infinite gradient"), DIVERGED),
    "nan activation": (Fault(1, "forward", 9, "lie nan activation"), DIVERGED),
    "nan norm": (Fault(2, "forward", 10, "lie nan norm"), DIVERGED),
    "infinite norm": (Fault(1, "forward", 10, "lie infinite norm"), DIVERGED),
    "negative norm": (Fault(3, "forward", 10, "lie negative norm"), DIVERGED),
    "long norm": (Fault(3, "forward", 10, "lie long norm"), "squared_norm"),
    "first id": (Fault(0, "forward", 9, "lie first id"), "65535"),
    "last id": (Fault(1, "forward", 9, "lie last id"), "65535"),
    "no object": (Fault(2, "forward", 10, "lie no object"), "frame refused: message is list, expected an object"),
    "no JSON": (Fault(3, "forward", 10, "lie no JSON"), "frame refused: message is"),
    "another step": (Fault(3, "forward", 10, "lie another step"), "the stages have lost step"),
    "more fields": (Fault(2, "forward", 10, "lie more fields"), "frame refused: outcome is"),
    "too long": (Fault(2, "forward", 10, "lie too long"), "frame refused: length is"),
    "flipped bit before encryption": (Fault(2, "backward", 9, "flip sent"), "frame refused: "),
    "flipped bit after decryption": (Fault(1, "forward", 9, "flip read"), "frame refused: "),
}
QUICK = ("nan gradient", "first id", "no object", "flipped bit before encryption")


def case(name: str):
    """Mark a case: one of each kind is quick."""
    return pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full])


@pytest.mark.parametrize("name", [case(name) for name in CASES])
def test_a_lie_is_refused(settings, quiet, tmp_path, capsys, name):
    fault, reason = CASES[name]
    assert refused_with(settings, tmp_path, [fault]) == 2
    error = capsys.readouterr().err
    assert reason in error, error
    assert "Traceback" not in error, error
    assert resumed(settings, tmp_path / "run") == quiet()


@pytest.mark.full
def test_an_id_that_only_a_hash_sees(settings, quiet, tmp_path, capsys):
    """Without a table of features any number has some: it must be refused before it is used."""
    words = ("--codec.fixed_cache_mb", "0")
    assert refused_with(settings, tmp_path, [Fault(0, "forward", 9, "lie first id")], *words) == 2
    assert "65535" in capsys.readouterr().err
    assert resumed(settings, tmp_path / "run", *words) == quiet(*words)
