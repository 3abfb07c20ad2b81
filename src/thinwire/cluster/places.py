"""Which places standbys have taken, as a worker knows it: kept in its run folder, for the time when it is started again.

The roster that people exchange stays as it is: it names the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.cluster.membership import run_name
from thinwire.link.identity import fingerprint
from thinwire.link.peer import WorkerId
from thinwire.link.roster import Roster
from thinwire.util.files import read_small, write_atomic
from thinwire.util.shown import shown

PLACES_FILE = "places.json"
PLACES_BYTES = 2**24


def keep_places(roster: Roster, run: Path) -> None:
    """Write down who has taken which place."""
    taken = [
        {"replica": worker_id.replica, "stage": worker_id.stage, "standby": fingerprint(worker.certificate)}
        for worker_id, worker in roster.taken.items()
    ]
    run.mkdir(parents=True, exist_ok=True)
    write_atomic(run / PLACES_FILE, json.dumps({"run": run_name(roster), "taken": taken}, indent=1).encode())


def known_places(roster: Roster, run: Path) -> Roster:
    """Return the roster with the places that were written down, checked; without such a file it is as it was."""
    path = run / PLACES_FILE
    if not path.is_file():
        return roster
    try:
        content = json.loads(read_small(path, PLACES_BYTES).decode())
        name, taken = content["run"], [read_entry(entry) for entry in content["taken"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} does not say who has which place ({type(error).__name__}: {shown(error)}); delete it, the standbys know"
        ) from None
    if name != run_name(roster):
        raise ValueError(
            f"{path} belongs to another roster: its run is {shown(name, 80)}, this one is {run_name(roster)}; "
            "use that roster or another --run"
        )
    standbys = {fingerprint(standby.certificate): standby for standby in roster.standbys}
    for worker_id, mark in taken:
        if worker_id not in roster.workers or mark not in standbys:
            raise ValueError(
                f"{path} says that the standby {shown(mark, 100)} has {worker_id}, and the roster lists no such standby or place; "
                "use the roster with which that happened"
            )
        roster = roster.taken_by(worker_id, standbys[mark])
    return roster


def read_entry(entry: dict[str, Any]) -> tuple[WorkerId, str]:
    """Read who has one place."""
    replica, stage, mark = entry["replica"], entry["stage"], entry["standby"]
    if type(replica) is not int or type(stage) is not int or type(mark) is not str or len(entry) != 3:
        raise ValueError(f"{shown(entry)} is not a replica, a stage and a fingerprint")
    return WorkerId(replica, stage), mark
