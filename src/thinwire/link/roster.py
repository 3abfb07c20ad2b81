"""The roster: the workers of a run by their ids, where each listens, and its certificate; and who stands by for a lost one.

A TOML file that people exchange. Which worker ids standbys hold by now is not in it (`cluster/places.py`).
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from thinwire.link.identity import certificate_of, written_anew
from thinwire.link.peer import STANDBYS, Worker, WorkerId, check_address
from thinwire.util.files import atomic_file, read_small
from thinwire.util.shown import shown

NAME_LETTERS = 32
"""Most characters of a worker's name."""
ROSTER_BYTES = 2**24
"""Most bytes of a roster: thousands of workers."""


@dataclass(frozen=True)
class Roster:
    """All workers of a run, by their ids, and those who stand by, as the file has them; it never changes."""

    workers: Mapping[WorkerId, Worker]
    standbys: tuple[Worker, ...] = ()
    """In the order in which they are asked."""

    @classmethod
    def of(cls, workers: Iterable[Worker], standbys: Iterable[Worker] = ()) -> Roster:
        """Build a checked roster."""
        entries: dict[WorkerId, Worker] = {}
        for worker in workers:
            if worker.id in entries:
                raise ValueError(f"the roster has two entries for {worker.id}; remove one")
            entries[worker.id] = _plain(worker)
        roster = cls(MappingProxyType(dict(sorted(entries.items()))), tuple(map(_plain, standbys)))
        roster.check()
        return roster

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy, in another process too, be built and checked from the entries."""
        return Roster.of, (tuple(self.workers.values()), self.standbys)

    def check(self) -> None:
        """Refuse what cannot work."""
        certificates: dict[bytes, WorkerId] = {}
        addresses: dict[str, WorkerId] = {}
        names: dict[str, WorkerId] = {}
        for worker in (*self.workers.values(), *self.standbys):
            worker_id, der = worker.id, certificate_of(worker.certificate)
            if worker.name is not None:
                check_name(worker.name, worker_id)
                if (other := names.setdefault(worker.name.casefold(), worker_id)) != worker_id:
                    raise ValueError(f"{worker_id} and {other} have the same name {worker.name}; change one")
            if der in certificates:
                raise ValueError(
                    f"{worker_id} and {certificates[der]} have the same certificate; each worker needs its own (`thinwire keys`)"
                )
            certificates[der] = worker_id
            if worker.address is None and worker_id.replica == STANDBYS:
                raise ValueError(
                    f'{worker_id} has no address, so nobody could ask it to replace a lost worker; give it an address = "host:port"'
                )
            if worker.address is not None:
                check_address(worker.address)
                if worker.address in addresses:
                    raise ValueError(f"{worker_id} and {addresses[worker.address]} have the same address {worker.address}; change one")
                addresses[worker.address] = worker_id
        for worker_id in self.workers:
            if worker_id.replica >= STANDBYS:
                raise ValueError(
                    f"an entry of the roster for stage {worker_id.stage} has the replica {worker_id.replica}; choose one below {STANDBYS}"
                )
            neighbour = WorkerId(worker_id.replica, worker_id.stage + 1)
            if neighbour in self.workers:
                listener_of(self.workers[worker_id], self.workers[neighbour])

    @property
    def run_name(self) -> str:
        """Name the run by its members: all of them derive the same name."""
        members = "\n".join(f"{worker_id} {worker.certificate.strip()}" for worker_id, worker in self.workers.items())
        return hashlib.sha256(members.encode()).hexdigest()[:16]

    def worker(self, worker_id: WorkerId) -> Worker:
        """Return the entry of a worker id."""
        if worker_id not in self.workers:
            known = ", ".join(map(str, self.workers)) or "none"
            raise ValueError(f"the roster has no entry for {worker_id} (it has: {known}); add it")
        return self.workers[worker_id]

    def called(self, worker_id: WorkerId, holder: Worker | None = None) -> str:
        """Call a worker id by the name of its entry, or of a standby that is its holder, if that has one: `attic (stage 1)`."""
        worker = holder or next((each for each in (*self.workers.values(), *self.standbys) if each.id == worker_id), None)
        if worker is None or worker.name is None:
            return str(worker_id)
        alone = worker_id.replica != STANDBYS and len({each.replica for each in self.workers}) == 1
        return f"{worker.name} ({f'stage {worker_id.stage}' if alone else worker_id})"

    def standby(self, certificate: str) -> Worker | None:
        """Return the standby with this certificate."""
        wanted = certificate_of(certificate)
        return next((each for each in self.standbys if certificate_of(each.certificate) == wanted), None)


def listener_of(first: Worker, second: Worker) -> WorkerId:
    """Tell which of two workers listens: the lower one if it has an address, else the other."""
    lower, upper = sorted((first, second), key=lambda worker: worker.id)
    for worker in (lower, upper):
        if worker.address is not None:
            return worker.id
    raise ValueError(
        f"{lower.id} and {upper.id} are neighbours and neither has an address, so neither can reach the other: "
        'give one of them an address = "host:port" that the other can reach'
    )


def _plain(worker: Worker) -> Worker:
    """Return an entry whose certificate is in the one form that a certificate has."""
    try:
        return replace(worker, certificate=written_anew(worker.certificate))
    except ValueError as error:
        raise ValueError(f"roster entry {worker.id}: {error}") from error


def check_name(name: str, worker_id: WorkerId) -> None:
    """Refuse a name that people could not read."""
    if not 0 < len(name) <= NAME_LETTERS or not name.isprintable() or name != name.strip():
        raise ValueError(
            f"{worker_id} has the name {shown(ascii(name), 80)}; choose one of 1 to {NAME_LETTERS} printable characters, such as attic"
        )


def read_roster(path: Path) -> Roster:
    """Read and check a roster file."""
    try:
        text = read_small(path, ROSTER_BYTES).decode()
    except FileNotFoundError as error:
        raise ValueError(f"the roster {path} does not exist; make it with `thinwire roster`") from error
    except OSError as error:
        raise ValueError(f"cannot read the roster {path}: {error.strerror}; make it with `thinwire roster`") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the roster {path} is not TOML: {error}") from error
    return parse_roster(text, f"the roster {path}")


def parse_roster(text: str, where: str) -> Roster:
    """Read and check the text of a roster; `where` names it in errors."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not TOML: {shown(error)}") from error
    entries, standbys = table.get("worker"), table.get("standby", [])
    if not {"worker"} <= set(table) <= {"worker", "standby"} or not isinstance(entries, list) or not isinstance(standbys, list):
        found = shown(", ".join(table)) or "nothing"
        raise ValueError(f"{where} must hold [[worker]] entries, if wanted [[standby]] ones, and nothing else; it has {found}")
    return Roster.of(
        (_worker(entry, f"entry {number} of {where}") for number, entry in enumerate(entries, 1)),
        [_standby(entry, number, f"standby {number} of {where}") for number, entry in enumerate(standbys)],
    )


def _worker(entry: object, where: str) -> Worker:
    """Read one entry."""
    fields = _fields(entry, where, {"replica": int, "stage": int, "certificate": str}, {"address": str, "name": str})
    return Worker(WorkerId(fields["replica"], fields["stage"]), fields["certificate"], fields.get("address"), fields.get("name"))


def _standby(entry: object, number: int, where: str) -> Worker:
    """Read one entry of those who stand by."""
    fields = _fields(entry, where, {"certificate": str}, {"address": str, "name": str})
    return Worker(WorkerId(STANDBYS, number), fields["certificate"], fields.get("address"), fields.get("name"))


def _fields(entry: object, where: str, needed: dict[str, type], free: dict[str, type]) -> dict[str, Any]:
    """Return the fields of an entry, refusing what has no place there and missing what is needed."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not a table; write [[worker]] or [[standby]]")
    types = needed | free
    for name, value in entry.items():
        if name not in types:
            raise ValueError(f"{where} has the unknown field {shown(repr(name), 80)}; known are {', '.join(types)}")
        if type(value) is not types[name] or (isinstance(value, int) and not 0 <= value < 2**32):
            kind = "a number from 0 to 4294967295" if types[name] is int else "a text"
            raise ValueError(f"{where}: {name} is {shown(value if isinstance(value, int) else repr(value), 80)}, expected {kind}")
    missing = [name for name in needed if name not in entry]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)}; add it")
    return entry


def write_roster(path: Path, roster: Roster) -> None:
    """Write a roster file in one piece, once its text is known to say the same again."""
    text = roster_text(roster)
    again = parse_roster(text, "what was to be written")
    if (again.workers, again.standbys) != (roster.workers, roster.standbys):
        raise ValueError(f"the roster {path} would not say what it was made from; it was not written")
    with atomic_file(path) as file:
        file.write(text.encode())


def roster_text(roster: Roster) -> str:
    """Write a roster as TOML."""
    lines = ["# thinwire roster: compare fingerprints with the owners before you use it. No address: the worker only dials out."]
    for worker in (*roster.workers.values(), *roster.standbys):
        if worker.id.replica == STANDBYS:
            lines += ["", "[[standby]]"]
        else:
            lines += ["", "[[worker]]", f"replica = {worker.id.replica}", f"stage = {worker.id.stage}"]
        for name, value in (("name", worker.name), ("address", worker.address)):
            if value is not None:
                lines.append(f'{name} = "{escaped(value)}"')
        lines += ['certificate = """', *map(escaped, worker.certificate.splitlines()), '"""']
    return "\n".join(lines) + "\n"


def escaped(line: str) -> str:
    """Write a line of text so that TOML cannot read anything else."""
    # JSON's escapes are TOML's, but for the delete character, which JSON leaves bare; whatever is not ASCII is escaped.
    return json.dumps(line)[1:-1].replace("\x7f", "\\u007f")
