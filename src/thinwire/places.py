"""Which places standbys have taken, as a worker knows it: kept in its run folder, for the time when it is started again.

The roster that people exchange stays as it is: it names the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.files import write_atomic
from thinwire.link.roster import Place, Roster
from thinwire.link.tls import fingerprint
from thinwire.seat import run_name

PLACES_FILE = "places.json"


def keep_places(roster: Roster, run: Path) -> None:
    """Write down who has taken which place."""
    taken = [
        {"replica": place.replica, "stage": place.stage, "standby": fingerprint(worker.certificate)}
        for place, worker in roster.taken.items()
    ]
    run.mkdir(parents=True, exist_ok=True)
    write_atomic(run / PLACES_FILE, json.dumps({"run": run_name(roster), "taken": taken}, indent=1).encode())


def known_places(roster: Roster, run: Path) -> Roster:
    """Return the roster with the places that were written down, checked; without such a file it is as it was."""
    path = run / PLACES_FILE
    if not path.is_file():
        return roster
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        name, taken = content["run"], [read_entry(entry) for entry in content["taken"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not say who has which place ({type(error).__name__}: {error}); delete it, the standbys know"
        ) from None
    if name != run_name(roster):
        raise ValueError(
            f"{path} belongs to another roster: its run is {name}, this one is {run_name(roster)}; use that roster or another --run"
        )
    standbys = {fingerprint(standby.certificate): standby for standby in roster.standbys}
    for place, mark in taken:
        if place not in roster.workers or mark not in standbys:
            raise ValueError(
                f"{path} says that the standby {mark} has {place}, and the roster lists no such standby or place; "
                "use the roster with which that happened"
            )
        roster = roster.taken_by(place, standbys[mark])
    return roster


def read_entry(entry: dict[str, Any]) -> tuple[Place, str]:
    """Read who has one place."""
    replica, stage, mark = entry["replica"], entry["stage"], entry["standby"]
    if type(replica) is not int or type(stage) is not int or type(mark) is not str or len(entry) != 3:
        raise ValueError(f"{str(entry)[:200]} is not a replica, a stage and a fingerprint")
    return Place(replica, stage), mark
