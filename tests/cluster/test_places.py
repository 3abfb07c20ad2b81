"""Which places standbys have taken, in a file."""

from __future__ import annotations

import pytest

from jobs import local_roster
from thinwire.cluster.membership import run_name
from thinwire.cluster.places import PLACES_FILE, keep_places, known_places
from thinwire.link.peer import WorkerId
from thinwire.link.roster import Roster

MIDDLE = WorkerId(0, 1)


@pytest.fixture
def roster(identities) -> Roster:
    return local_roster(identities, 3, standbys=2)


def test_places_survive_the_file(roster, tmp_path):
    assert known_places(roster, tmp_path) is roster
    changed = roster.taken_by(MIDDLE, roster.standbys[1])
    keep_places(changed, tmp_path / "run")
    again = known_places(roster, tmp_path / "run")
    assert again == changed and again.worker(MIDDLE).address == roster.standbys[1].address
    assert run_name(again) == run_name(roster)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"run": "', '"run": "other', "belongs to another roster"),
        ('"stage": 1', '"stage": 9', "no such standby or place"),
        ('"standby": "', '"standby": "00:', "no such standby or place"),
        ('"stage": 1', '"stage": true', "is not a replica, a stage and a fingerprint"),
        ('"stage": 1', '"step": 1', "does not say who has which place"),
        ("{", "", "does not say who has which place.*delete it"),
    ],
)
def test_a_file_of_places_is_checked(roster, tmp_path, old, new, message):
    keep_places(roster.taken_by(MIDDLE, roster.standbys[0]), tmp_path)
    path = tmp_path / PLACES_FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        known_places(roster, tmp_path)
