"""`thinwire keys` and `thinwire roster`: what a certificate's file may hold, what the roster then says, and who is called what."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from thinwire.cli import main as cli
from thinwire.link.identity import Identity, fingerprint, make_identity
from thinwire.link.peer import WorkerId
from thinwire.link.roster import read_roster


@pytest.fixture
def people(tmp_path) -> dict[str, Identity]:
    return {name: make_identity(tmp_path / name, name) for name in ("alice", "bob", "carol", "mallory")}


def write(tmp_path: Path, *words: str) -> int:
    return cli.main(["roster", str(tmp_path / "roster.toml"), *words])


def entry(identity: Identity, address: str = "none", more: str = "") -> str:
    return f"{address}={identity.certificate_path}{more}"


def stages(people: dict[str, Identity]) -> list[str]:
    return ["--stage", entry(people["alice"], "a:1"), "--stage", entry(people["bob"])]


def injected(people: dict[str, Identity]) -> dict[str, str]:
    """List texts that Bob might send instead of his certificate."""
    bob, mallory = people["bob"].certificate, people["mallory"].certificate
    hidden = f'"""\n\n[[standby]]\naddress = "m:1"\ncertificate = """\n{mallory}'
    escaped = mallory.replace("-----BEGIN", "\\u002d\\u002d\\u002d\\u002d\\u002dBEGIN").replace(
        "-----END CERTIFICATE-----", "-----END CERTIFICATE\\u002d\\u002d\\u002d\\u002d\\u002d"
    )
    return {
        "a hidden standby": bob + hidden,
        "another certificate in escapes": escaped + bob,
        "two certificates": bob + mallory,
        "text before it": "hello\n" + bob,
        "text behind it": bob + "hello\n",
        "text within it": bob.replace("\n-----END", "\n hello\n-----END"),
        "a key": people["bob"].key_path.read_text() + bob,
    }


@pytest.mark.parametrize("case", injected(dict.fromkeys(("bob", "mallory"), Identity(Path(os.devnull), Path(os.devnull), ""))))
def test_a_file_with_anything_but_one_certificate_is_refused(tmp_path, people, capsys, case):
    people["bob"].certificate_path.write_text(injected(people)[case])
    assert write(tmp_path, *stages(people)) == 2
    assert "exactly one certificate" in capsys.readouterr().err
    assert not (tmp_path / "roster.toml").exists()


def test_a_certificate_in_another_layout_is_written_as_usual(tmp_path, people):
    """Such as one that came by mail: the roster has what `thinwire keys` wrote."""
    path, pem = people["bob"].certificate_path, people["bob"].certificate
    path.write_bytes(b"\n\n" + pem.replace("\n", "\r\n").encode() + b"\r\n")
    assert write(tmp_path, *stages(people)) == 0
    assert read_roster(tmp_path / "roster.toml").worker(WorkerId(0, 1)).certificate == pem


def test_the_fingerprints_that_are_printed_are_those_of_the_file(tmp_path, people, capsys):
    assert write(tmp_path, *stages(people), "--standby", entry(people["carol"], "c:1")) == 0
    lines = capsys.readouterr().out.splitlines()
    roster = read_roster(tmp_path / "roster.toml")
    for line, worker in zip(lines, (*roster.workers.values(), *roster.standbys), strict=False):
        assert line.endswith(fingerprint(worker.certificate))
    assert lines[1].endswith(people["bob"].fingerprint)


@pytest.mark.parametrize("address", ['a:1"\n[[standby]]', "a\x1b[2J:1", "a b:1", "a" * 300 + ":1"])
def test_an_address_is_a_host_and_a_port_and_nothing_else(tmp_path, people, capsys, address):
    assert write(tmp_path, "--stage", entry(people["alice"], address), "--stage", entry(people["bob"], "b:1")) == 2
    error = capsys.readouterr().err
    assert "host:port" in error and "\x1b" not in error


def test_names_stand_in_the_roster_and_are_used(tmp_path, people, capsys):
    words = ["--stage", entry(people["alice"], "a:1", ",name=attic"), "--stage", entry(people["bob"])]
    assert write(tmp_path, *words, "--standby", entry(people["carol"], "c:1", ",name=the cellar, left")) == 0
    out = capsys.readouterr().out
    roster = read_roster(tmp_path / "roster.toml")
    assert [worker.name for worker in (*roster.workers.values(), *roster.standbys)] == ["attic", None, "the cellar, left"]
    assert roster.called(WorkerId(0, 0)) == "attic (stage 0)"
    assert roster.called(WorkerId(0, 1)) == "replica 0 stage 1"
    assert roster.called(roster.standbys[0].id) == "the cellar, left (standby 0)"
    assert roster.called(WorkerId(3, 7)) == "replica 3 stage 7"
    assert roster.called(WorkerId(0, 1), roster.standbys[0]) == "the cellar, left (stage 1)"
    assert [line.split("  ")[0] for line in out.splitlines()[:3]] == [
        "attic (stage 0)",
        "replica 0 stage 1",
        "the cellar, left (standby 0)",
    ]


def test_a_name_says_the_replica_where_there_are_several(tmp_path, people):
    words = ["--stage", entry(people["alice"], "a:1", ",name=attic"), "--stage", entry(people["bob"], "b:1")]
    assert write(tmp_path, "--replicas", "2", *words) == 0
    assert read_roster(tmp_path / "roster.toml").called(WorkerId(0, 0)) == "attic (replica 0 stage 0)"


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "1 to 32 printable characters"),
        ("x" * 33, "1 to 32 printable characters"),
        ("a\x1b[2Jb", "1 to 32 printable characters"),
        ("a\u202eb", "1 to 32 printable characters"),
        (" a", "1 to 32 printable characters"),
        ("ATTIC", "the same name"),
    ],
)
def test_a_name_that_cannot_be_shown_or_told_apart_is_refused(tmp_path, people, capsys, name, message):
    words = ["--stage", entry(people["alice"], "a:1", ",name=attic"), "--stage", entry(people["bob"], more=f",name={name}")]
    assert write(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.rstrip("\n").isprintable()


def test_a_certificate_file_that_is_none_is_refused_without_being_read_to_the_end(tmp_path, people, capsys):
    words = ["--stage", entry(people["alice"], "a:1"), "--stage"]
    assert write(tmp_path, *words, "none=/dev/zero") == 2
    assert "regular file" in capsys.readouterr().err
    people["bob"].certificate_path.write_bytes(bytes(2**20))
    assert write(tmp_path, *words, entry(people["bob"])) == 2
    assert "65536 bytes" in capsys.readouterr().err
    people["bob"].certificate_path.write_bytes(b"\xff\xfe")
    assert write(tmp_path, *words, entry(people["bob"])) == 2
    assert "exactly one certificate" in capsys.readouterr().err


def test_nobody_else_can_ever_open_the_key(tmp_path, monkeypatch):
    """Not even in the moment in which its temporary file is made."""
    modes: list[int] = []
    before = os.open

    def opened(path, flags, mode=0o777, **more):
        number = before(path, flags, mode, **more)
        if flags & os.O_CREAT and "key.pem" in str(path):
            modes.append(stat.S_IMODE(os.fstat(number).st_mode))
        return number

    monkeypatch.setattr(os, "open", opened)
    mask = os.umask(0)
    try:
        identity = make_identity(tmp_path / "me", "me")
    finally:
        os.umask(mask)
    assert modes == [0o600], "the key's file must be made by os.open with its mode"
    assert stat.S_IMODE(identity.key_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(identity.certificate_path.stat().st_mode) == 0o666


@pytest.mark.parametrize("days", ["0", "-3", "99999999", "2000000000"])
def test_a_validity_that_cannot_be_is_refused(tmp_path, capsys, days):
    assert cli.main(["keys", str(tmp_path / "keys"), "--days", days]) == 2
    assert "choose 1 to 36500" in capsys.readouterr().err and not (tmp_path / "keys").exists()
