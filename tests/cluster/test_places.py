"""Who holds which worker id: now, in the next epoch, and in the file."""

from __future__ import annotations

import json

import pytest

from jobs import local_roster
from thinwire.cluster.places import PLACES_FILE, Places, read_places
from thinwire.link.peer import WorkerId
from thinwire.link.roster import Roster

FIRST, MIDDLE, LAST = (WorkerId(0, stage) for stage in range(3))


@pytest.fixture
def roster(identities) -> Roster:
    return local_roster(identities, 3, standbys=2)


def certificates(places: Places) -> list[str]:
    return [places.worker(worker_id).certificate for worker_id in (FIRST, MIDDLE, LAST)]


def test_a_standby_holds_what_it_took_last(roster):
    places, standby = Places(roster), roster.standbys[0]
    assert places.held_by(standby) is None
    places.take(FIRST, standby)
    assert places.held_by(standby) == FIRST and places.worker(FIRST).id == FIRST and places.worker(FIRST).address == standby.address
    places.take(LAST, standby)
    assert places.held_by(standby) == LAST
    assert certificates(places) == [roster.workers[FIRST].certificate, roster.workers[MIDDLE].certificate, standby.certificate]


def test_what_is_expected_holds_from_the_next_epoch_on(roster):
    places, (first, second) = Places(roster), roster.standbys
    before = certificates(places)
    places.expect(MIDDLE, first, replaced=True)
    places.expect(LAST, second)
    assert certificates(places) == before and places.changes(MIDDLE) and places.changes(LAST) and not places.changes(FIRST)
    places.begin_epoch()
    assert certificates(places) == [before[0], first.certificate, second.certificate]
    assert not places.changes(MIDDLE) and places.was_replaced(MIDDLE) and not places.was_replaced(LAST)


def test_the_newest_process_is_that_of_a_certificate_not_of_a_worker_id(roster):
    places = Places(roster)
    places.meet({FIRST: 7, MIDDLE: None})
    assert places.newest(FIRST) == 7 and places.newest(MIDDLE) is None
    places.take(FIRST, roster.standbys[0])
    assert places.newest(FIRST) is None
    places.meet({FIRST: 3})
    assert places.newest(FIRST) == 3


def test_who_listens_follows_the_holder(roster, identities):
    dials = Roster.of([type(worker)(worker.id, worker.certificate) if worker.id == FIRST else worker for worker in roster.workers.values()])
    places = Places(Roster.of(dials.workers.values(), roster.standbys))
    assert places.listener(MIDDLE, FIRST) == MIDDLE
    places.take(FIRST, roster.standbys[0])
    assert places.listener(MIDDLE, FIRST) == FIRST


def test_holders_survive_the_file_and_the_number_of_a_process_grows(roster, tmp_path):
    run = tmp_path / "run"
    places = read_places(roster, run)
    assert certificates(places) == certificates(Places(roster)) and not run.exists()
    places.take(MIDDLE, roster.standbys[1])
    again = read_places(roster, run)
    assert certificates(again) == certificates(places) and again.incarnation > places.incarnation
    assert again.roster is roster


def test_the_file_is_written_only_when_it_changes(roster, tmp_path):
    places = read_places(roster, tmp_path)
    places.keep()
    (tmp_path / PLACES_FILE).unlink()
    places.keep()
    assert not (tmp_path / PLACES_FILE).exists()
    places.expect(MIDDLE, roster.standbys[0])
    places.begin_epoch()
    assert (tmp_path / PLACES_FILE).exists()


def test_without_a_run_folder_nothing_is_written(roster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = Places(roster)
    places.take(MIDDLE, roster.standbys[0])
    places.keep()
    assert not list(tmp_path.iterdir())


def test_a_number_alone_does_not_bind_a_folder_to_a_roster(roster, identities, tmp_path):
    """People may write the roster of a run anew, with other keys, as long as no standby holds a worker id of the old one."""
    read_places(roster, tmp_path).keep()
    other = local_roster(identities[1:], 3, standbys=2)
    assert other.run_name != roster.run_name
    before = json.loads((tmp_path / PLACES_FILE).read_text())["incarnation"]
    assert read_places(other, tmp_path).incarnation > before


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"run": "', '"run": "other', "belongs to another roster"),
        ('"stage": 1', '"stage": 9', "no such standby or worker"),
        ('"standby": "', '"standby": "00:', "no such standby or worker"),
        ('"stage": 1', '"stage": true', "is not a replica, a stage and a fingerprint"),
        ('"stage": 1', '"step": 1', "does not say who holds which worker id"),
        ('"incarnation": ', '"incarnation": -', "is not the number of a process"),
        ('"incarnation": ', '"incarnation": 9999999999', "is not the number of a process"),
        ("{", "", "does not say who holds which worker id.*delete it"),
    ],
)
def test_a_file_of_holders_is_checked(roster, tmp_path, old, new, message):
    read_places(roster, tmp_path).take(MIDDLE, roster.standbys[0])
    path = tmp_path / PLACES_FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_places(roster, tmp_path)
