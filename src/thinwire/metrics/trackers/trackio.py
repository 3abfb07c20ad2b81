"""Curves for trackio: rows in its local database, seen with `trackio show`.

The project is the folder of the runs, the run has the name of its folder. The rows go straight into the database of this machine
(`trackio.init` would ask a server for the user's name, and send everything away where its environment names one): nothing here opens a
connection or a port.
"""

from __future__ import annotations

import math
import sqlite3
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trackio.sqlite_storage import SQLiteStorage

from thinwire.config.sections import RunConfig
from thinwire.config.toml import flatten
from thinwire.metrics.track import Tracker, scalars

FLUSH_SECONDS = 5.0
"""How old the curves on a screen may be; a transaction per step would wait for the disk each time."""


class Trackio(Tracker):
    """Write every number of a step, and the settings with the first."""

    def __init__(self, run: Path, config: RunConfig, *, resume: bool) -> None:
        place = run.resolve()
        self.project, self.name, self.resume = place.parent.name or "thinwire", place.name, resume
        self.config: dict[str, Any] | None = flatten(config)
        self.identity: str | None = None
        self.pending: dict[int, tuple[str, dict[str, float]]] = {}
        self.written_at = -math.inf

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.identity = self.identity or self.open(step)
        # The stages of a run come one by one: what they say of a step becomes one row, if it comes in time.
        _, row = self.pending.setdefault(step, (datetime.now(UTC).isoformat(), {}))
        row |= scalars(values)
        if time.monotonic() - self.written_at >= FLUSH_SECONDS:
            self.write()

    def open(self, step: int) -> str:
        """Return the identity of the run in the database; after a resume it is the earlier one, less the steps done again."""
        known = SQLiteStorage.get_latest_run_record_by_name(self.project, self.name) if self.resume else None
        if known is None:
            return uuid.uuid4().hex
        with closing(sqlite3.connect(SQLiteStorage.get_project_db_path(self.project))) as database, database:
            database.execute("DELETE FROM metrics WHERE run_id = ? AND step >= ?", (known["id"], step))
        return str(known["id"])

    def write(self) -> None:
        """Write the rows held back, in one transaction."""
        if self.pending:
            times, rows = zip(*self.pending.values(), strict=True)
            SQLiteStorage.bulk_log(
                self.project,
                self.name,
                list(rows),
                steps=list(self.pending),
                timestamps=list(times),
                config=self.config,
                run_id=self.identity,
            )
        self.pending, self.config, self.written_at = {}, None, time.monotonic()

    def close(self) -> None:
        self.write()
