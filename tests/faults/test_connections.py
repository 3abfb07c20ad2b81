"""What happens to connections is the links' affair: a delay, and the same bits, without a step abandoned."""

from __future__ import annotations

import random

import pytest

from faults.inject import Fault
from faults.support import run_with
from link.support import World, pair
from patience import HANG
from thinwire.config.profiles import find_profile
from thinwire.link.contract import Contract
from thinwire.link.frame import Channel, Frame, Kind

SILENT = ("--link.silent_seconds", "5", "--link.reconnect_seconds", "300")
CASES = {
    "reset": ([Fault(2, "forward", 9, "reset"), Fault(1, "backward", 5, "reset")], ()),
    "short cut": ([Fault(2, "forward", 9, "cut", 1.5)], ()),
    "cut": ([Fault(2, "forward", 9, "cut", 7.0)], SILENT),
    "cut of what leaves": ([Fault(3, "forward", 9, "cut out", 7.0)], SILENT),
    "cut of what comes in": ([Fault(0, "forward", 9, "cut in", 7.0)], SILENT),
    "rate": (
        [Fault(1, "forward", 5, "rate", 0.05), Fault(1, "forward", 9, "rate", 20.0), Fault(2, "backward", 12, "rate", 0.1)],
        ("--link.profile", "20mbps_2ms"),
    ),
    "bit of a record": ([Fault(2, "forward", 9, "flip cipher"), Fault(1, "backward", 11, "flip cipher")], ()),
}
QUICK = ("reset", "cut of what leaves", "rate", "bit of a record")


def assert_unnoticed(settings: str, quiet, folder, faults: list[Fault], *words: str) -> None:
    hashes, heard = run_with(settings, folder, faults, *words)
    assert hashes == quiet()
    assert not [message for _, message in heard if "lost" in message or "abandoned" in message]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CASES])
def test_a_broken_connection_changes_no_bit(settings, quiet, tmp_path, name):
    faults, words = CASES[name]
    assert_unnoticed(settings, quiet, tmp_path, faults, *words)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_resets_at_random_moments(settings, quiet, tmp_path, seed):
    generator = random.Random(seed)
    points = [(point, number) for point in ("forward", "backward", "optimizer") for number in range(1, 24 if point != "optimizer" else 12)]
    faults = [Fault(stage, *point, "reset") for stage in (1, 2, 3) for point in generator.sample(points, 8)]
    assert_unnoticed(settings, quiet, tmp_path, faults)


@pytest.mark.full
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("way", ["cut", "cut out", "cut in"])
def test_every_stage_is_cut_off(settings, quiet, tmp_path, stage, way):
    assert_unnoticed(settings, quiet, tmp_path, [Fault(stage, "forward", 9, way, 7.0)], *SILENT)


@pytest.mark.full
def test_a_line_on_which_a_record_takes_seconds(tmp_path):
    """64 KB at 0.05 Mbit/s take 10.5 s, each record of 16 KB 2.6 s: slow, but not silent."""
    contract = Contract(limits={Kind.STEP: 2**20})
    with pair(World(tmp_path), contract, profile=find_profile("0.05mbps")) as (left, right, _):
        left.send(Frame.make(Kind.STEP, bytes(2**16)), HANG)
        assert len(right.receive(Channel.CONTROL, HANG).payload) == 2**16
