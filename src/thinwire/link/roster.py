"""The roster: which worker has which place, where it listens, and its certificate. A TOML file that people exchange."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from thinwire.files import atomic_file
from thinwire.link.tls import certificate_of


@dataclass(frozen=True, order=True)
class Place:
    """Where a worker stands."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"replica {self.replica} stage {self.stage}"

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
    """All workers of a run, by place."""

    workers: dict[Place, Worker]

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> Roster:
        """Build a checked roster."""
        entries: dict[Place, Worker] = {}
        for worker in workers:
            if worker.place in entries:
                raise ValueError(f"the roster has two entries for {worker.place}; remove one")
            entries[worker.place] = worker
        roster = cls(dict(sorted(entries.items())))
        roster.check()
        return roster

    def check(self) -> None:
        """Refuse what cannot work."""
        certificates: dict[bytes, Place] = {}
        addresses: dict[str, Place] = {}
        for place, worker in self.workers.items():
            try:
                der = certificate_of(worker.certificate)
            except ValueError as error:
                raise ValueError(f"roster entry {place}: {error}") from error
            if der in certificates:
                raise ValueError(f"{place} and {certificates[der]} have the same certificate; each worker needs its own (`thinwire keys`)")
            certificates[der] = place
            if worker.address is not None:
                split_address(worker.address)
                if worker.address in addresses:
                    raise ValueError(f"{place} and {addresses[worker.address]} have the same address {worker.address}; change one")
                addresses[worker.address] = place
        for place in self.workers:
            neighbour = Place(place.replica, place.stage + 1)
            if neighbour in self.workers:
                self.listener(place, neighbour)

    def worker(self, place: Place) -> Worker:
        """Return the entry of a place."""
        if place not in self.workers:
            known = ", ".join(map(str, self.workers)) or "none"
            raise ValueError(f"the roster has no entry for {place} (it has: {known}); add it")
        return self.workers[place]

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
    entries = table.get("worker")
    if set(table) != {"worker"} or not isinstance(entries, list):
        raise ValueError(f"the roster {path} must hold [[worker]] entries and nothing else; it has {', '.join(table) or 'nothing'}")
    return Roster.of(_worker(entry, number, path) for number, entry in enumerate(entries, 1))


def _worker(entry: object, number: int, path: Path) -> Worker:
    """Read one entry."""
    types = {"replica": int, "stage": int, "certificate": str, "address": str}
    where = f"entry {number} of the roster {path}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not a table; write [[worker]]")
    for name, value in entry.items():
        if name not in types:
            raise ValueError(f"{where} has the unknown field {name!r}; known are {', '.join(types)}")
        if type(value) is not types[name] or (isinstance(value, int) and value < 0):
            raise ValueError(f"{where}: {name} is {value!r}, expected {'a number from 0' if types[name] is int else 'a text'}")
    missing = [name for name in ("replica", "stage", "certificate") if name not in entry]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)}; add it")
    return Worker(Place(entry["replica"], entry["stage"]), entry["certificate"], entry.get("address"))


def write_roster(path: Path, roster: Roster) -> None:
    """Write a roster file in one piece."""
    lines = ["# thinwire roster: compare fingerprints with the owners before you use it. No address: the worker only dials out."]
    for place, worker in roster.workers.items():
        lines += ["", "[[worker]]", f"replica = {place.replica}", f"stage = {place.stage}"]
        if worker.address is not None:
            lines.append(f"address = {json.dumps(worker.address)}")
        lines += [f'certificate = """\n{worker.certificate.strip()}\n"""']
    with atomic_file(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
