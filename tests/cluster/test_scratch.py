"""Scratch folders of workers: nobody else's is touched, those of the dead go, and ports are held."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.test_launch import Supervisor, needs_proc
from patience import wait_until
from thinwire.cluster.scratch import OWNER_FILE, PREFIX, held_ports, remove_orphans, scratch_folder
from thinwire.link.peer import WorkerId
from thinwire.link.roster import read_roster

HOLD = """
import sys
from thinwire.cluster.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "key.pem").write_text("secret")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """Give this test, and the processes it starts, a folder for temporary files of their own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def owner() -> tuple[subprocess.Popen, Path]:
    """Start a process that has a scratch folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_dead_owner_goes_at_the_next_start(temporary):
    (dead, left), (living, kept) = owner(), owner()
    try:
        dead.kill()
        dead.wait()
        assert (left / "key.pem").exists()
        with scratch_folder() as own:
            assert not left.exists() and (kept / "key.pem").exists() and own.stat().st_mode & 0o077 == 0
        assert not own.exists()
        living.communicate("")
        assert not kept.exists()
    finally:
        for process in (dead, living):
            process.kill()
            process.communicate()


def test_what_is_not_surely_ours_stays(temporary):
    """A folder without the file of its owner, one that others can read, one behind a link, and one whose file is a link."""
    bare, public, target, linked = (temporary / f"{PREFIX}{name}" for name in ("bare", "public", "target", "linked"))
    elsewhere = temporary / "elsewhere"
    for folder in (bare, public, linked, elsewhere):
        folder.mkdir(mode=0o700)
    (public / OWNER_FILE).touch()
    public.chmod(0o755)
    (elsewhere / OWNER_FILE).touch()
    target.symlink_to(elsewhere)
    (linked / OWNER_FILE).symlink_to(elsewhere / OWNER_FILE)
    remove_orphans()
    assert all(path.exists() for path in (bare, public, target, linked, elsewhere / OWNER_FILE))


def test_a_held_port_is_for_workers_only():
    with held_ports(3) as ports:
        assert len(set(ports)) == 3
        for reuse in (True, False):
            with socket.socket() as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                with pytest.raises(OSError, match="Address already in use"):
                    stranger.bind(("127.0.0.1", ports[0]))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", ports[0]))
        with socket.create_server(("127.0.0.1", ports[0]), reuse_port=True):
            socket.create_connection(("127.0.0.1", ports[0])).close()


@needs_proc
def test_a_launcher_that_is_killed_leaves_keys_only_until_the_next_start(config, temporary):
    with Supervisor(config, temporary / "run") as run:
        run.wait_for_steps()
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        run.assert_alone()
    assert list(temporary.glob(f"{PREFIX}*/*/key.pem"))
    with scratch_folder():
        assert len(list(temporary.glob(f"{PREFIX}*"))) == 1
    assert not list(temporary.glob(f"{PREFIX}*"))


@needs_proc
def test_nobody_gets_the_port_of_a_lost_worker(config, temporary):
    """Its supervisor is stopped, so that it stays lost while somebody else asks for its port."""
    with Supervisor(config, temporary / "run") as run:
        run.wait_for_steps()
        (roster,) = temporary.glob(f"{PREFIX}*/roster.toml")
        ports = [int(read_roster(roster).worker(WorkerId(0, stage)).address.rpartition(":")[2]) for stage in range(2)]
        lost = run.worker(1)
        os.kill(run.process.pid, signal.SIGSTOP)
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: lost not in run.members())
        for port in ports:
            with pytest.raises(OSError, match="Address already in use"):
                socket.create_server(("127.0.0.1", port))
        os.kill(run.process.pid, signal.SIGCONT)
        lines = iter(run.process.stdout.readline, "")
        assert any("all stages go on from step" in line for line in lines)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end()[0] == 0
