"""The copy thread when things go wrong: nobody waits for ever, and whoever waits hears why."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from patience import HANG
from thinwire.memory.blocks import BlockCost, Choice
from thinwire.memory.offload import OffloadThread, slow_bytes
from thinwire.memory.saved_tensors import SavedTensors
from thinwire.memory.slow_memory import ALIGNMENT, FileMemory

BLOCKS = [BlockCost(str(index), 0.0, 0.0, 4000, 0) for index in range(3)]
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


def forward(offload: OffloadThread, index: int) -> SavedTensors:
    saved = SavedTensors(index, frozenset(), offload.count)
    offload.start_forward(index)
    with saved.hooks():
        weight = torch.full((1000,), 2.0, requires_grad=True)
        saved.pack(weight.detach().clone())
    offload.end_forward(saved)
    return saved


def test_a_disk_that_does_not_answer_is_given_up():
    slow = Slow()
    offload = OffloadThread(BLOCKS, OUT, room=8000, slow=slow, stall_seconds=0.3)
    forward(offload, 0)
    forward(offload, 1)
    with pytest.raises(ValueError, match=r"moved nothing for 0\.3 s while training waits for .* the forward of 2.*--memory\.folder"):
        forward(offload, 2)
    offload.close()
    assert not slow.closed  # the thread still has its file
    slow.free.set()


def test_a_slow_disk_is_waited_for():
    slow = Slow()
    offload = OffloadThread(BLOCKS, OUT, room=8000, slow=slow, stall_seconds=HANG)
    forward(offload, 0)
    forward(offload, 1)
    third = threading.Thread(target=forward, args=(offload, 2))
    third.start()
    assert slow.begun.wait(HANG) and offload.used == 8000  # there is no room for the third
    slow.free.set()
    third.join(HANG)
    assert slow.moved >= 4000 and offload.peak <= 8000
    offload.close()
    assert slow.closed


@pytest.mark.parametrize("error", [ValueError("cannot write"), RuntimeError("odd")])
def test_what_the_copy_thread_meets_is_raised_where_one_waits(error):
    slow = Slow()
    slow.error = error
    offload = OffloadThread(BLOCKS, OUT, room=8000, slow=slow)
    forward(offload, 0)
    forward(offload, 1)
    slow.free.set()
    with pytest.raises(ValueError, match=r"cannot write|copying activations failed"):
        forward(offload, 2)
    with pytest.raises(ValueError, match=r"cannot write|copying activations failed"):
        forward(offload, 2)  # and again: nobody goes on without it
    assert offload.problem is not None
    offload.close()
    assert slow.closed


def test_a_prefetch_takes_no_place_of_a_recompute(tmp_path):
    """One byte is missing for two blocks at once: the offloaded one comes back when the recomputed ones are done."""
    choices: list[Choice] = ["offload", "recompute", "recompute"]
    slow = FileMemory(tmp_path, slow_bytes(BLOCKS, choices, 1))
    offload = OffloadThread(BLOCKS, choices, room=7999, slow=slow)
    microbatch = [forward(offload, index) for index in range(3)]
    offload.want(microbatch)
    for index in (2, 1):
        offload.start_backward(microbatch[index])
        time.sleep(0.1)
        assert microbatch[0].state == "away"
        offload.end_backward(microbatch[index])
    offload.start_backward(microbatch[0])
    assert microbatch[0].state == "back" and microbatch[0].storages[0].view(torch.float32).eq(2).all()
    offload.end_backward(microbatch[0])
    assert offload.used == offload.counted == 0 and offload.peak <= 7999
    offload.close()
