"""What the workers of one machine share while they run: a folder with their keys and roster, and the ports they listen on.

The folder goes when its owner ends. An owner that was killed cannot see to that: the next one does. A folder's owner holds a lock on a
file in it, which the system takes away when the owner is dead and never before.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from thinwire.link.identity import make_identity
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.roster import Roster, write_roster
from thinwire.util.system import has_owners, is_private_folder, seize

PREFIX = "thinwire-"
OWNER_FILE = "owner.lock"
UNLOCKED_SECONDS = 60.0
"""How old the file is at least before its lock is tried, where it is found before it is locked."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder that only this user can read, delete it afterwards, and those that dead owners have left."""
    remove_orphans()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, ExitStack() as stack:
        folder = Path(name)
        name = f"{OWNER_FILE}.new" if has_owners() else OWNER_FILE  # Windows renames no open file
        owner = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # not inherited: workers do not hold the lock
        stack.callback(os.close, owner)
        seize(owner)
        if name != OWNER_FILE:
            (folder / name).rename(folder / OWNER_FILE)  # locked before anyone can find it
        yield folder


def remove_orphans() -> None:
    """Delete the scratch folders of this user whose owners are dead."""
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                _remove_if_orphan(folder)


def _remove_if_orphan(folder: Path) -> None:
    if not is_private_folder(folder):
        return  # a link, somebody else's, or not made by us
    path = folder / OWNER_FILE
    owner = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))  # without the file it is no scratch folder, or not one yet
    try:
        about = os.fstat(owner)
        if not stat.S_ISREG(about.st_mode) or (not has_owners() and time.time() - about.st_mtime < UNLOCKED_SECONDS):
            return
        seize(owner)  # OSError: its owner lives
    finally:
        os.close(owner)  # before the rest: Windows deletes no open file
    shutil.rmtree(folder, ignore_errors=True)


def worker_name(worker_id: WorkerId) -> str:
    """Name a worker's process and files."""
    return f"replica-{worker_id.replica}-stage-{worker_id.stage}" if worker_id.replica else f"stage-{worker_id.stage}"


def make_local_roster(folder: Path, worker_ids: Sequence[WorkerId], ports: Sequence[int]) -> None:
    """Make identities and a roster for workers on this machine, each with its port of the loopback address."""
    workers = []
    for worker_id, port in zip(worker_ids, ports, strict=True):
        name = worker_name(worker_id)
        identity = make_identity(folder / name, name, days=3650)
        workers.append(Worker(worker_id, identity.certificate, f"127.0.0.1:{port}"))
    write_roster(folder / "roster.toml", Roster.of(workers))


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Hold free ports of the loopback address for workers of this user: nobody else gets one, not even while its worker is lost.

    They are bound and never listened on: connections go to the worker that listens, or are refused while there is none. Where two sockets
    of a user cannot have one port they are only known to have been free.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        yield free_ports(count)
        return
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # a worker may bind it too, if it says the same
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
