"""The copy thread when things go wrong: nobody waits for ever, and whoever waits hears why."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from patience import HANG
from thinwire.memory.blocks import Block, Choice
from thinwire.memory.offload import Courier, slow_bytes
from thinwire.memory.saved_tensors import Parcel
from thinwire.memory.tier import ALIGNMENT, FileTier

BLOCKS = [Block(str(index), 0.0, 0.0, 4000, 0) for index in range(3)]
OUT: list[Choice] = ["offload"] * 3


class Slow:
    """Slow memory that does nothing until it is let."""

    size, moved = 3 * ALIGNMENT, 0

    def __init__(self) -> None:
        self.free, self.begun, self.closed, self.error = threading.Event(), threading.Event(), False, None

    def mark(self) -> None:
        return None

    def write(self, place, pieces, mark=None) -> None:
        self.begun.set()
        self.free.wait(HANG)
        if self.error is not None:
            raise self.error
        self.moved += sum(map(len, pieces))

    def read(self, place, pieces) -> None:
        self.write(place, pieces)

    def close(self) -> None:
        self.closed = True


def forward(courier: Courier, index: int) -> Parcel:
    parcel = Parcel(index, frozenset(), courier.count)
    courier.start_forward(index)
    with parcel.hooks():
        weight = torch.full((1000,), 2.0, requires_grad=True)
        parcel.put(weight.detach().clone())
    courier.end_forward(parcel)
    return parcel


def test_a_disk_that_does_not_answer_is_given_up():
    slow = Slow()
    courier = Courier(BLOCKS, OUT, room=8000, tier=slow, stall_seconds=0.3)
    forward(courier, 0)
    forward(courier, 1)
    with pytest.raises(ValueError, match=r"moved nothing for 0\.3 s while training waits for .* the forward of 2.*--memory\.folder"):
        forward(courier, 2)
    courier.close()
    assert not slow.closed  # the thread still has its file
    slow.free.set()


def test_a_slow_disk_is_waited_for():
    slow = Slow()
    courier = Courier(BLOCKS, OUT, room=8000, tier=slow, stall_seconds=HANG)
    forward(courier, 0)
    forward(courier, 1)
    third = threading.Thread(target=forward, args=(courier, 2))
    third.start()
    assert slow.begun.wait(HANG) and courier.used == 8000  # there is no room for the third
    slow.free.set()
    third.join(HANG)
    assert slow.moved >= 4000 and courier.peak <= 8000
    courier.close()
    assert slow.closed


@pytest.mark.parametrize("error", [ValueError("cannot write"), RuntimeError("odd")])
def test_what_the_copy_thread_meets_is_raised_where_one_waits(error):
    slow = Slow()
    slow.error = error
    courier = Courier(BLOCKS, OUT, room=8000, tier=slow)
    forward(courier, 0)
    forward(courier, 1)
    slow.free.set()
    with pytest.raises(ValueError, match=r"cannot write|copying activations failed"):
        forward(courier, 2)
    with pytest.raises(ValueError, match=r"cannot write|copying activations failed"):
        forward(courier, 2)  # and again: nobody goes on without it
    assert courier.problem is not None
    courier.close()
    assert slow.closed


def test_a_prefetch_takes_no_place_of_a_recompute(tmp_path):
    """One byte is missing for two blocks at once: the offloaded one comes back when the recomputed ones are done."""
    choices: list[Choice] = ["offload", "recompute", "recompute"]
    tier = FileTier(tmp_path, slow_bytes(BLOCKS, choices, 1))
    courier = Courier(BLOCKS, choices, room=7999, tier=tier)
    parcels = [forward(courier, index) for index in range(3)]
    courier.want(parcels)
    for index in (2, 1):
        courier.start_backward(parcels[index])
        time.sleep(0.1)
        assert parcels[0].state == "away"
        courier.end_backward(parcels[index])
    courier.start_backward(parcels[0])
    assert parcels[0].state == "back" and parcels[0].pieces[0].view(torch.float32).eq(2).all()
    courier.end_backward(parcels[0])
    assert courier.used == courier.counted == 0 and courier.peak <= 7999
    courier.close()
