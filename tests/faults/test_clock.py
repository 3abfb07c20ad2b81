"""Clocks of the day may jump: all times are counted, and the number of a worker's process grows whatever the clock says."""

from __future__ import annotations

import pytest

from faults.inject import Fault
from faults.support import run_with
from jobs import local_roster
from thinwire.cluster import places

HOUR = 3600.0
CASES = {
    "back, and the worker is replaced": [Fault(2, "forward", 9, "clock kill", -24 * HOUR)],
    "forward, and the worker is replaced": [Fault(1, "optimizer", 5, "clock kill", 24 * HOUR)],
    "while it runs": [Fault(stage, "forward", 7 + stage, "clock", (-1) ** stage * HOUR) for stage in range(4)],
    "back, twice": [Fault(2, "forward", 9, "clock kill", -24 * HOUR), Fault(2, "optimizer", 3, "clock kill", -48 * HOUR)],
}
QUICK = ("back, and the worker is replaced",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CASES])
def test_a_jump_changes_no_bit(settings, quiet, tmp_path, name):
    assert run_with(settings, tmp_path, CASES[name])[0] == quiet()


def test_the_number_of_a_process_grows_though_the_clock_goes_back(identities, tmp_path, monkeypatch):
    roster = local_roster(identities, 2)
    first = places.read_places(roster, tmp_path / "run")
    first.keep()
    monkeypatch.setattr(places.time, "time_ns", lambda: 5_000)
    assert places.read_places(roster, tmp_path / "run").incarnation == first.incarnation + 1
    assert places.read_places(roster, tmp_path / "other").incarnation == 5


@pytest.mark.full
def test_a_process_that_was_lost_while_it_started_has_left_its_number(settings, quiet, tmp_path):
    """Its neighbours have met it already: a successor with a smaller number would be taken for an older process and turned away."""
    assert run_with(settings, tmp_path, [Fault(2, "restore", 1, "clock kill", -HOUR)])[0] == quiet()
