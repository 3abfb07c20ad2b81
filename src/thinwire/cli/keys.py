"""Identities and rosters: `thinwire keys FOLDER` makes a worker's key and certificate, `thinwire roster` puts the workers together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.link.identity import fingerprint, make_identity, read_certificate
from thinwire.link.peer import STANDBYS, Worker, WorkerId
from thinwire.link.roster import Roster, read_roster, write_roster
from thinwire.util.shown import shown

MOST_DAYS = 36500
"""Longest validity of a certificate: a hundred years."""


@dataclass(frozen=True, kw_only=True)
class KeysCommand:
    """Make a worker's identity: a private key that stays here and a certificate for the others."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder for key.pem and certificate.pem."""
    name: str = "worker"
    """Name in the certificate."""
    days: int = 3650
    """Days the certificate is valid."""


@dataclass(frozen=True, kw_only=True)
class RosterCommand:
    """Write the roster of a run: who is which stage, where it listens, and its certificate."""

    file: Annotated[Path, tyro.conf.Positional]
    """Roster to write."""
    stage: tyro.conf.UseAppendAction[tuple[str, ...]]
    """One per stage in order: ADDRESS=CERTIFICATE, such as 203.0.113.5:29400=a/certificate.pem; `none` for one that only dials out. With
    `,name=attic` behind it the worker is called so."""
    replicas: int = 1
    """Copies of the pipeline; --stage then lists all stages of the first copy, then those of the second, and so on."""
    standby: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """One per machine that takes the place of a lost one, in the order in which they are asked: ADDRESS=CERTIFICATE or
    ADDRESS=CERTIFICATE,name=NAME."""


def keys(argv: list[str]) -> None:
    """Run the `keys` verb."""
    command = tyro.cli(KeysCommand, prog="thinwire keys", args=argv, use_underscores=True)
    if not 1 <= command.days <= MOST_DAYS:
        raise ValueError(f"--days is {command.days}; choose 1 to {MOST_DAYS}, such as 3650 for ten years")
    identity = make_identity(command.folder, command.name, command.days)
    print(f"{identity.certificate_path}: give this file to the others; {identity.key_path.name} stays here")
    print(f"fingerprint {identity.fingerprint}: compare it with the others over the phone")


def roster(argv: list[str]) -> None:
    """Run the `roster` verb."""
    command = tyro.cli(RosterCommand, prog="thinwire roster", args=argv, use_underscores=True)
    if command.file.exists():
        raise ValueError(f"{command.file} exists; choose another name, or delete it first")
    if not command.stage:
        raise ValueError("a roster lists the workers of a run: give --stage ADDRESS=CERTIFICATE once for each stage, in order")
    stages, left = divmod(len(command.stage), max(1, command.replicas))
    if command.replicas < 1 or left:
        raise ValueError(
            f"--replicas is {command.replicas} and --stage is given {len(command.stage)} times; "
            "each replica has as many stages as the others: give --stage once for each of them"
        )
    workers = [read_worker(text, WorkerId(*divmod(number, stages)), "--stage") for number, text in enumerate(command.stage)]
    standbys = [read_worker(text, WorkerId(STANDBYS, number), "--standby") for number, text in enumerate(command.standby)]
    write_roster(command.file, Roster.of(workers, standbys))
    written = read_roster(command.file)  # what people compare over the phone must be what everyone will read
    for worker in (*written.workers.values(), *written.standbys):
        print(f"{written.called(worker.id)}  {worker.address or 'dials out'}  {fingerprint(worker.certificate)}")
    print(f"{command.file}: give this file to every worker{' and standby' if standbys else ''}")


def read_worker(text: str, worker_id: WorkerId, option: str) -> Worker:
    """Read one ADDRESS=CERTIFICATE or ADDRESS=CERTIFICATE,name=NAME that stands behind an option."""
    address, equals, rest = text.partition("=")
    path, comma, name = rest.partition(",name=")
    if not equals:
        raise ValueError(
            f"{option} {shown(repr(text))} is not of the form ADDRESS=CERTIFICATE, such as 203.0.113.5:29400=a/certificate.pem, "
            "with ,name=NAME behind it if you like"
        )
    return Worker(worker_id, read_certificate(Path(path)), None if address == "none" else address, name if comma else None)
