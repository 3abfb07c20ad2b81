"""Calls that systems differ in: each falls back, and a private file is private before anything is in it."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from thinwire.link.identity import KEY_FILE, make_identity
from thinwire.util import system
from thinwire.util.files import atomic_file, sync, write_atomic


class InUse(PermissionError):
    winerror = 32


def refusing(times: int, error: OSError):
    """Return an `os.replace` that refuses so many times."""
    left, replace = [times], os.replace

    def call(source, target):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        replace(source, target)

    return call


def test_a_file_that_someone_has_open_is_replaced_when_it_is_free(tmp_path, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(system.time, "sleep", pauses.append)
    monkeypatch.setattr(os, "replace", refusing(3, InUse(errno.EACCES, "used by another process")))
    write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new" and len(pauses) == 3


@pytest.mark.parametrize("error", [InUse(errno.EACCES, "in use"), PermissionError(errno.EACCES, "Permission denied")])
def test_a_file_that_is_never_free_stays_as_it_was(tmp_path, monkeypatch, error):
    pauses: list[float] = []
    monkeypatch.setattr(system.time, "sleep", pauses.append)
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", refusing(10**6, error))
    with pytest.raises(PermissionError):
        write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["file"]
    assert len(pauses) == (len(system.PAUSES) if isinstance(error, InUse) else 0)


def test_places_of_a_file_without_the_calls_for_them(tmp_path, monkeypatch):
    for name in ("pwrite", "preadv", "fdatasync", "posix_fadvise"):
        monkeypatch.delattr(os, name, raising=False)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        assert system.write_at(file, memoryview(b"abcdef"), 4) == 6 and system.write_at(file, memoryview(b"xy"), 0) == 2
        system.leave_page_cache(file, 0, 10, written=True)
        back = bytearray(5)
        assert system.read_at(file, memoryview(back), 3) == 5 and back == b"\0abcd"
        assert system.read_at(file, memoryview(back), 8) == 2 and system.read_at(file, memoryview(back), 99) == 0
    finally:
        os.close(file)


def test_a_folder_is_not_synced_where_it_cannot_be_opened(tmp_path, monkeypatch):
    opened: list = []
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "open", lambda path, *words, real=os.open, **more: opened.append(path) or real(path, *words, **more))
    sync(tmp_path)
    assert opened == [tmp_path]
    monkeypatch.delattr(os, "getuid")
    sync(tmp_path)
    sync(tmp_path / "file")
    assert opened == [tmp_path, tmp_path / "file"]


def test_a_key_is_private_before_it_is_written(tmp_path, monkeypatch):
    asked = []

    def run(*words: str) -> str:
        (file,) = (tmp_path / "keys").iterdir()
        asked.append((words, file.stat().st_size))
        return '"desktop\\ada","S-1-5-21-7"\r\n'

    monkeypatch.delattr(os, "getuid")
    monkeypatch.setattr(system, "_run", run)
    make_identity(tmp_path / "keys", "ada")
    (user, _), (access, size) = asked
    assert user[0] == "whoami" and access[0] == "icacls" and access[2:] == ("/inheritance:r", "/grant:r", "*S-1-5-21-7:F") and size == 0


def test_no_key_is_kept_that_others_can_read(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "getuid")
    monkeypatch.setenv("PATH", str(tmp_path))  # no such programs
    with pytest.raises(ValueError, match="cannot be kept from other users"):
        make_identity(tmp_path / "keys", "ada")
    assert list((tmp_path / "keys").iterdir()) == []


def test_where_files_have_owners_the_mode_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "_run", lambda *words: pytest.fail("there is nothing to ask"))
    make_identity(tmp_path, "ada")
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    with atomic_file(tmp_path / "other") as file:
        file.write(b"x")
