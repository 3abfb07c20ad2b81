"""The roster: which worker has which place, where it listens, and its certificate; and who stands by for a lost one.

A TOML file that people exchange. Which places standbys have taken since is not in it (`places.py`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.files import atomic_file
from thinwire.link.tls import certificate_of

STANDBYS = 2**20
"""The number of the replica in which standbys stand, one behind the other; real replicas have smaller ones."""


@dataclass(frozen=True, order=True)
class Place:
    """Where a worker stands."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"standby {self.stage}" if self.replica == STANDBYS else f"replica {self.replica} stage {self.stage}"

    def beside(self, side: int) -> Place:
        """Return the place before (-1) or behind (1) in the same replica."""
        return Place(self.replica, self.stage + side)

    def sides(self, stages: int) -> dict[int, Place]:
        """Return the places before (-1) and behind (1) that there are in a replica of so many stages."""
        return {side: self.beside(side) for side in (-1, 1) if 0 <= self.stage + side < stages}


@dataclass(frozen=True)
class Worker:
    """One entry; without an address the worker only dials out."""

    place: Place
    certificate: str
    address: str | None = None

    @property
    def host_and_port(self) -> tuple[str, int]:
        assert self.address is not None
        return split_address(self.address)


@dataclass(frozen=True)
class Roster:
    """All workers of a run, by place, and those who stand by."""

    workers: dict[Place, Worker]
    """As the file has them: they name the run."""
    standbys: tuple[Worker, ...] = ()
    """In the order in which they are asked."""
    taken: dict[Place, Worker] = field(default_factory=dict)
    """Places that are a standby's by now."""

    @classmethod
    def of(cls, workers: Iterable[Worker], standbys: Iterable[Worker] = ()) -> Roster:
        """Build a checked roster."""
        entries: dict[Place, Worker] = {}
        for worker in workers:
            if worker.place in entries:
                raise ValueError(f"the roster has two entries for {worker.place}; remove one")
            entries[worker.place] = worker
        roster = cls(dict(sorted(entries.items())), tuple(standbys))
        roster.check()
        return roster

    def check(self) -> None:
        """Refuse what cannot work."""
        certificates: dict[bytes, Place] = {}
        addresses: dict[str, Place] = {}
        for worker in (*self.workers.values(), *self.standbys):
            place = worker.place
            try:
                der = certificate_of(worker.certificate)
            except ValueError as error:
                raise ValueError(f"roster entry {place}: {error}") from error
            if der in certificates:
                raise ValueError(f"{place} and {certificates[der]} have the same certificate; each worker needs its own (`thinwire keys`)")
            certificates[der] = place
            if worker.address is None and place.replica == STANDBYS:
                raise ValueError(f'{place} has no address, so nobody could ask it to take a place; give it an address = "host:port"')
            if worker.address is not None:
                split_address(worker.address)
                if worker.address in addresses:
                    raise ValueError(f"{place} and {addresses[worker.address]} have the same address {worker.address}; change one")
                addresses[worker.address] = place
        for place in self.workers:
            if place.replica >= STANDBYS:
                raise ValueError(
                    f"an entry of the roster for stage {place.stage} has the replica {place.replica}; choose one below {STANDBYS}"
                )
            neighbour = Place(place.replica, place.stage + 1)
            if neighbour in self.workers:
                self.listener(place, neighbour)

    def worker(self, place: Place) -> Worker:
        """Return who has a place now."""
        if place not in self.workers:
            known = ", ".join(map(str, self.workers)) or "none"
            raise ValueError(f"the roster has no entry for {place} (it has: {known}); add it")
        return self.taken.get(place) or self.workers[place]

    def standby(self, certificate: str) -> Worker | None:
        """Return the standby with this certificate."""
        wanted = certificate_of(certificate)
        return next((each for each in self.standbys if certificate_of(each.certificate) == wanted), None)

    def taken_by(self, place: Place, standby: Worker) -> Roster:
        """Return the roster in which a standby has this place, and no other."""
        others = {other: worker for other, worker in self.taken.items() if worker.certificate != standby.certificate}
        return replace(self, taken=others | {place: replace(standby, place=place)})

    def listener(self, first: Place, second: Place) -> Place:
        """Tell which of two workers listens: the lower one if it has an address, else the other."""
        lower, upper = sorted((first, second))
        for place in (lower, upper):
            if self.worker(place).address is not None:
                return place
        raise ValueError(
            f"{lower} and {upper} are neighbours and neither has an address, so neither can reach the other: "
            'give one of them an address = "host:port" that the other can reach'
        )


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or (":" in bare and bare == host) or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"address {address!r} is not host:port with a port from 1 to 65535; write it like 203.0.113.7:29500 or [::1]:29500"
        )
    return bare, int(port)


def read_roster(path: Path) -> Roster:
    """Read and check a roster file."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"the roster {path} does not exist; make it with `thinwire roster`") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the roster {path} is not TOML: {error}") from error
    entries, standbys = table.get("worker"), table.get("standby", [])
    if not {"worker"} <= set(table) <= {"worker", "standby"} or not isinstance(entries, list) or not isinstance(standbys, list):
        found = ", ".join(table) or "nothing"
        raise ValueError(f"the roster {path} must hold [[worker]] entries, if wanted [[standby]] ones, and nothing else; it has {found}")
    return Roster.of(
        (_worker(entry, f"entry {number} of the roster {path}") for number, entry in enumerate(entries, 1)),
        [_standby(entry, number, f"standby {number} of the roster {path}") for number, entry in enumerate(standbys)],
    )


def _worker(entry: object, where: str) -> Worker:
    """Read one entry."""
    fields = _fields(entry, where, {"replica": int, "stage": int, "certificate": str, "address": str})
    return Worker(Place(fields["replica"], fields["stage"]), fields["certificate"], fields.get("address"))


def _standby(entry: object, number: int, where: str) -> Worker:
    """Read one entry of those who stand by."""
    fields = _fields(entry, where, {"certificate": str, "address": str})
    return Worker(Place(STANDBYS, number), fields["certificate"], fields.get("address"))


def _fields(entry: object, where: str, types: dict[str, type]) -> dict[str, Any]:
    """Return the fields of an entry, refusing what has no place there; all but the address must be there."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not a table; write [[worker]] or [[standby]]")
    for name, value in entry.items():
        if name not in types:
            raise ValueError(f"{where} has the unknown field {name!r}; known are {', '.join(types)}")
        if type(value) is not types[name] or (isinstance(value, int) and value < 0):
            raise ValueError(f"{where}: {name} is {value!r}, expected {'a number from 0' if types[name] is int else 'a text'}")
    missing = [name for name in types if name not in entry and name != "address"]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)}; add it")
    return entry


def write_roster(path: Path, roster: Roster) -> None:
    """Write a roster file in one piece."""
    lines = ["# thinwire roster: compare fingerprints with the owners before you use it. No address: the worker only dials out."]
    for worker in (*roster.workers.values(), *roster.standbys):
        if worker.place.replica == STANDBYS:
            lines += ["", "[[standby]]"]
        else:
            lines += ["", "[[worker]]", f"replica = {worker.place.replica}", f"stage = {worker.place.stage}"]
        if worker.address is not None:
            lines.append(f"address = {json.dumps(worker.address)}")
        lines += [f'certificate = """\n{worker.certificate.strip()}\n"""']
    with atomic_file(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
