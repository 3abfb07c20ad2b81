"""The roster file."""

from __future__ import annotations

import os

import pytest

from thinwire.link.peer import STANDBYS, Worker, WorkerId, split_address
from thinwire.link.roster import Roster, listener_of, read_roster, write_roster


@pytest.fixture
def certificates(world) -> list[str]:
    return [world.identity(f"stage{number}").certificate for number in range(3)]


def test_a_roster_survives_the_file(tmp_path, certificates):
    workers = [Worker(WorkerId(0, 1), certificates[1]), Worker(WorkerId(0, 0), certificates[0], "[::1]:29500")]
    roster = Roster.of(workers)
    write_roster(tmp_path / "roster.toml", roster)
    again = read_roster(tmp_path / "roster.toml")
    assert list(again.workers) == [WorkerId(0, 0), WorkerId(0, 1)]
    assert again.worker(WorkerId(0, 0)).host_and_port == ("::1", 29500)
    assert again.worker(WorkerId(0, 1)).address is None
    assert again.worker(WorkerId(0, 1)).certificate.strip() == certificates[1].strip()


def standby(certificate: str, address: str | None, number: int = 0) -> Worker:
    return Worker(WorkerId(STANDBYS, number), certificate, address)


def test_standbys_survive_the_file_in_their_order(tmp_path, certificates):
    standbys = [standby(certificates[2], "s:1"), standby(certificates[1], "t:1", 1)]
    write_roster(tmp_path / "roster.toml", Roster.of([Worker(WorkerId(0, 0), certificates[0], "a:1")], standbys))
    again = read_roster(tmp_path / "roster.toml")
    assert list(again.workers) == [WorkerId(0, 0)]
    assert [(str(each.id), each.address) for each in again.standbys] == [("standby 0", "s:1"), ("standby 1", "t:1")]
    assert again.standby(certificates[1] + "\n") == again.standbys[1] and again.standby(certificates[0]) is None


def test_a_roster_never_changes(certificates):
    roster = Roster.of([Worker(WorkerId(0, 0), certificates[0], "a:1")])
    with pytest.raises(TypeError):
        roster.workers[WorkerId(0, 1)] = Worker(WorkerId(0, 1), certificates[1])
    with pytest.raises(AttributeError):
        roster.standbys = ()


@pytest.mark.parametrize(
    "used, address, message",
    [
        (2, None, "standby 0 has no address.*give it an address"),
        (2, "s", "not host:port"),
        (2, "b:1", "standby 0 and replica 0 stage 1 have the same address"),
        (0, "s:1", "standby 0 and replica 0 stage 0 have the same certificate"),
    ],
)
def test_a_standby_that_cannot_work_is_refused(certificates, used, address, message):
    workers = [Worker(WorkerId(0, stage), certificates[stage], f"{'ab'[stage]}:1") for stage in range(2)]
    with pytest.raises(ValueError, match=message):
        Roster.of(workers, [standby(certificates[used], address)])


def test_the_lower_stage_listens_if_it_can(certificates):
    low, high = WorkerId(0, 0), WorkerId(0, 1)
    both = Roster.of([Worker(low, certificates[0], "a:1"), Worker(high, certificates[1], "b:1")])
    assert listener_of(both.worker(high), both.worker(low)) == low
    upper = Roster.of([Worker(low, certificates[0]), Worker(high, certificates[1], "b:1")])
    assert listener_of(upper.worker(low), upper.worker(high)) == high


@pytest.mark.parametrize(
    "worker_ids, addresses, used, message",
    [
        ([(0, 0), (0, 1)], [None, None], [0, 1], "neither has an address.*give one of them"),
        ([(0, 0), (0, 0)], ["a:1", "b:1"], [0, 1], "two entries for replica 0 stage 0"),
        ([(0, 0), (0, 1)], ["a:1", "a:1"], [0, 1], "same address"),
        ([(0, 0), (0, 1)], ["a:1", "b:1"], [0, 0], "same certificate"),
        ([(0, 0)], ["a"], [0], "not host:port"),
    ],
)
def test_what_cannot_work_is_refused(certificates, worker_ids, addresses, used, message):
    workers = [
        Worker(WorkerId(*worker_id), certificates[number], address)
        for worker_id, address, number in zip(worker_ids, addresses, used, strict=True)
    ]
    with pytest.raises(ValueError, match=message):
        Roster.of(workers)


def test_stages_that_are_no_neighbours_need_no_address(certificates):
    Roster.of(
        [Worker(WorkerId(0, 0), certificates[0]), Worker(WorkerId(0, 1), certificates[1], "b:1"), Worker(WorkerId(0, 2), certificates[2])]
    )


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "::1:80", "host:8o"])
def test_bad_addresses(address):
    with pytest.raises(ValueError, match="not host:port"):
        split_address(address)


@pytest.mark.parametrize(
    "text, message",
    [
        ("worker = 3", "\\[\\[worker\\]\\]"),
        ("[[worker]]\nstage = 0\nreplica = 0", "no certificate"),
        ("[[worker]]\nstage = 0\nreplica = 0\ncertificate = 'x'", "replica 0 stage 0: not exactly one certificate"),
        ("[[worker]]\nstage = 'a'\nreplica = 0\ncertificate = 'x'", "stage is 'a'"),
        ("[[worker]]\nstage = true\nreplica = 0\ncertificate = 'x'", "stage is True"),
        ("[[worker]]\nstage = -1\nreplica = 0\ncertificate = 'x'", "stage is -1"),
        ("[[worker]]\nadress = 'a:1'", "unknown field 'adress'"),
        ("[[worker", "not TOML"),
        ("[[standby]]\naddress = 'a:1'", "\\[\\[worker\\]\\]"),
        ("worker = []\nstandby = 3", "\\[\\[standby\\]\\]"),
        ("worker = []\n[[standby]]\nstage = 1", "standby 0 of .* unknown field 'stage'"),
        ("worker = []\n[[standby]]\naddress = 'a:1'", "standby 0 of .* no certificate"),
        (f"[[worker]]\nstage = 0\nreplica = {STANDBYS}\ncertificate = 'x'", "not exactly one certificate"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path, text, message):
    path = tmp_path / "roster.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_roster(path)


def test_a_missing_roster_names_the_command(tmp_path):
    with pytest.raises(ValueError, match="thinwire roster"):
        read_roster(tmp_path / "none.toml")


@pytest.mark.parametrize("way", ["two", "escaped", "in front"])
def test_a_roster_that_hides_a_second_certificate_is_refused(tmp_path, certificates, way):
    """Whoever compares fingerprints must compare those of what is trusted."""
    hidden = certificates[1].replace("-----BEGIN", "\\u002d\\u002d\\u002d\\u002d\\u002dBEGIN") if way == "escaped" else certificates[1]
    both = certificates[0] + hidden if way == "two" else hidden + certificates[0]
    path = tmp_path / "roster.toml"
    path.write_text(f'[[worker]]\nstage = 0\nreplica = 0\naddress = "a:1"\ncertificate = """\n{both}"""\n')
    with pytest.raises(ValueError, match="not exactly one certificate"):
        read_roster(path)


def test_a_roster_that_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "roster.toml")
    with pytest.raises(ValueError, match="not a regular file"):
        read_roster(tmp_path / "roster.toml")


@pytest.mark.parametrize("address", ["attic..example.org:29400", f"{'a' * 64}.org:29400"])
def test_a_name_that_nobody_can_look_up_is_refused(address):
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)
