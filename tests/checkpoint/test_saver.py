"""Snapshots beside the training: what was at the call is what is written, and nothing goes before something newer is there."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from checkpoint.support import FACTS, trained
from patience import HANG
from thinwire import checkpoint
from thinwire.checkpoint import Position, Saver, saver

ALL = [0, 1]


class Gate:
    """A disk that writes nothing until it is opened, and notes what it was given."""

    def __init__(self, monkeypatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.written: list[str] = []
        self.original = saver.write_parts
        monkeypatch.setattr(saver, "write_parts", self.write)

    def write(self, folder: Path, parts) -> None:
        self.written.append(folder.name)
        self.reached.set()
        assert self.opened.wait(HANG)
        self.original(folder, parts)


def steps(run: Path) -> list[int]:
    return [checkpoint.step_of(folder) for folder in checkpoint.steps(run)]


def test_what_was_at_the_call_is_what_is_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    pipeline, optimizers = trained(2)
    expected = checkpoint.weights_sha256(pipeline.stages)
    moments = {name: tensor.clone() for name, tensor in optimizers[0].state_tensors().items()}
    mine = Saver(tmp_path, ALL, FACTS)
    mine.save(pipeline.stages, optimizers, Position(2, 1.5))
    assert mine.newest is None
    for tensor in [*pipeline.stages[0].state_dict().values(), *optimizers[0].state_tensors().values()]:
        tensor.zero_()
    gate.opened.set()
    mine.close()
    assert (mine.newest, mine.problem) == (2, None)
    again, others = trained(0)
    assert checkpoint.load_stages(checkpoint.newest(tmp_path, 2), again.stages, others, FACTS) == Position(2, 1.5)
    assert checkpoint.weights_sha256(again.stages) == expected
    assert all(bool((tensor == moments[name]).all()) for name, tensor in others[0].state_tensors().items())


def test_a_newer_one_replaces_the_one_that_waits_and_never_three_are_in_memory(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    alive: weakref.WeakSet = weakref.WeakSet()
    original = saver.part_of

    def part_of(*arguments, **words):
        part = original(*arguments, **words)
        alive.update(part.tensors.values())
        stages = sum(1 for _ in alive) / len(part.tensors)
        assert stages <= 2.1, "a third snapshot of one stage"
        return part

    monkeypatch.setattr(saver, "part_of", part_of)
    pipeline, optimizers = trained(1)
    mine = Saver(tmp_path, [0], FACTS)
    for step in (1, 2, 3):
        mine.save(pipeline.stages[:1], optimizers[:1], Position(step, 0.0))
        assert gate.reached.wait(HANG)
    gate.opened.set()
    mine.flush()
    assert gate.written == ["step-000001", "step-000003"] and mine.newest == 3
    mine.close()
    assert not [tensor for tensor in alive if tensor.numel() > 1], "memory is let go"


def test_a_worker_deletes_only_what_all_have_confirmed(tmp_path):
    pipeline, optimizers = trained(1)
    mine = Saver(tmp_path, [0], FACTS)

    def left(step: int, spare: tuple[int, ...] = ()) -> list[int]:
        mine.confirm(step, spare)
        mine.flush()
        return steps(tmp_path)

    assert left(7) == []  # before the first: nothing to delete, nothing breaks
    for step in (1, 2, 3, 4):
        mine.save(pipeline.stages[:1], optimizers[:1], Position(step, 0.0))
        mine.flush()
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert left(5) == [1, 2, 3, 4]  # newer than ours: a message that cannot be true deletes nothing
    assert left(3) == [2, 3, 4]
    mine.save(pipeline.stages[:1], optimizers[:1], Position(5, 0.0))
    mine.flush()
    # Two: the one that all have, and the one that is spared in place of the one before.
    assert left(4, spare=(2,)) == [2, 4, 5] and mine.written == (4, 5)
    assert left(5) == [4, 5] and mine.written == (5,)
    mine.close()


def test_deleting_is_not_waited_for(tmp_path, monkeypatch):
    pipeline, optimizers = trained(1)
    mine = Saver(tmp_path, [0], FACTS)
    for step in (1, 2, 3):
        mine.save(pipeline.stages[:1], optimizers[:1], Position(step, 0.0))
        mine.flush()
    opened, original = threading.Event(), saver.prune

    def prune(*arguments) -> None:
        assert opened.wait(HANG)
        original(*arguments)

    monkeypatch.setattr(saver, "prune", prune)
    mine.confirm(3)
    assert steps(tmp_path) == [1, 2, 3] and mine.written == (3,), "the disk is slow, and nobody waits"
    opened.set()
    mine.close()
    assert steps(tmp_path) == [2, 3]


def test_a_process_with_all_stages_confirms_for_itself(tmp_path):
    pipeline, optimizers = trained(1)
    mine = Saver(tmp_path, ALL, FACTS)
    for step in (1, 2, 3, 4):
        mine.save(pipeline.stages, optimizers, Position(step, 0.0))
        mine.flush()
    mine.close()
    assert steps(tmp_path) == [3, 4]


def test_an_older_stretch_goes_once_two_newer_ones_are_confirmed(tmp_path):
    pipeline, optimizers = trained(1)
    checkpoint.save(tmp_path, pipeline.stages, optimizers, Position(4, 0.0), FACTS)
    mine = Saver(tmp_path, ALL, FACTS | {"microbatches": 4})
    for step in (6, 8):
        assert (tmp_path / "checkpoints/step-000004/stage-1.json").exists()
        mine.save(pipeline.stages, optimizers, Position(step, 0.0, "2,2x2@4"))
        mine.flush()
    mine.close()
    assert steps(tmp_path) == [6, 8]


def test_no_thread_outlives_close(tmp_path):
    before = threading.active_count()
    pipeline, optimizers = trained(1)
    mine = Saver(tmp_path, ALL, FACTS)
    for step in range(5):
        mine.save(pipeline.stages, optimizers, Position(step, 0.0))
    mine.close()
    assert threading.active_count() == before and mine.newest == 4
    mine.close()


def test_a_failed_write_is_told_and_the_next_one_tries_again(tmp_path):
    pipeline, optimizers = trained(1)
    mine = Saver(tmp_path, ALL, FACTS)
    mine.save(pipeline.stages, optimizers, Position(1, 0.0))
    mine.flush()
    blocker = tmp_path / "checkpoints/step-000002"
    blocker.write_text("a file stands where the folder should")
    mine.save(pipeline.stages, optimizers, Position(2, 0.0))
    with pytest.raises(
        ValueError, match=r"checkpoint of step 2 was not written to .*: File exists; .* free, \d+\.\d [KM]B are needed; .*is untouched"
    ):
        mine.flush()
    assert mine.problem is not None and mine.newest == 1
    mine.save(pipeline.stages, optimizers, Position(3, 0.0))
    mine.flush()
    mine.close()
    assert mine.problem is None and mine.newest == 3


ENDING = """
import sys
from pathlib import Path
from checkpoint.support import FACTS, trained
from thinwire.checkpoint import Position, Saver, saver
import time
original = saver.write_parts
def slow(folder, parts):
    time.sleep(0.3)
    original(folder, parts)
saver.write_parts = slow
pipeline, optimizers = trained(1)
Saver(Path(sys.argv[1]), [0, 1], FACTS).save(pipeline.stages, optimizers, Position(1, 0.0))
"""


def test_the_end_of_the_interpreter_loses_no_write(tmp_path):
    here = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {here!r})\n{ENDING}"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=HANG).returncode == 0
    assert checkpoint.newest(tmp_path, 2).name == "step-000001"
