"""A full, read-only or vanished disk: training goes on, the last good checkpoint stays, the next one tries again. Real file systems."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.support import FACTS, trained
from thinwire import checkpoint
from thinwire.checkpoint import Position, Saver

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a file system: needs root on Linux")
SIZE = 2 << 20


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """Mount a small file system."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def names(run: Path) -> list[str]:
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())


def is_good(run: Path, step: int, sha256: str) -> bool:
    pipeline, optimizers = trained(0)
    position = checkpoint.load_stages(checkpoint.newest(run, 2), pipeline.stages, optimizers, FACTS)
    return position.step == step and checkpoint.weights_sha256(pipeline.stages) == sha256


@pytest.mark.parametrize("room", [0, 4096, 100_000, 300_000])
def test_a_full_disk(disk, room):
    """Whatever room is left, from nothing to enough for one stage of two."""
    pipeline, optimizers = trained(1)
    first = checkpoint.weights_sha256(pipeline.stages)
    mine = Saver(disk, [0, 1], FACTS)
    mine.save(pipeline.stages, optimizers, Position(1, 0.0))
    mine.flush()
    before = names(disk)
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(b"x" * max(0, free - room))
    for step in (2, 3):  # training goes on
        mine.save(pipeline.stages, optimizers, Position(step, 0.0))
        with pytest.raises(ValueError, match=f"step {step} was not written .*No space left on device.*make room"):
            mine.flush()
        assert mine.problem is not None and mine.newest == 1
    filler.unlink()
    assert names(disk) == before and is_good(disk, 1, first)
    again, others = trained(2)
    mine.save(again.stages, others, Position(4, 0.0))
    mine.flush()
    mine.close()
    assert mine.problem is None and mine.newest == 4 and is_good(disk, 4, checkpoint.weights_sha256(again.stages))


def test_a_disk_that_turns_read_only(disk):
    pipeline, optimizers = trained(1)
    mine = Saver(disk, [0, 1], FACTS)
    mine.save(pipeline.stages, optimizers, Position(1, 0.0))
    mine.flush()
    before = names(disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    mine.save(pipeline.stages, optimizers, Position(2, 0.0))
    with pytest.raises(ValueError, match="Read-only file system"):
        mine.flush()
    mine.confirm(1)
    assert names(disk) == before and is_good(disk, 1, checkpoint.weights_sha256(pipeline.stages))
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    mine.save(pipeline.stages, optimizers, Position(3, 0.0))
    mine.flush()
    mine.close()
    assert mine.newest == 3 and is_good(disk, 3, checkpoint.weights_sha256(pipeline.stages))


def test_a_folder_that_is_gone(disk):
    pipeline, optimizers = trained(1)
    run = disk / "run"
    run.mkdir()
    mine = Saver(run, [0, 1], FACTS)
    run.rmdir()
    run.write_text("no folder any more")
    mine.save(pipeline.stages, optimizers, Position(1, 0.0))
    mine.close()
    assert mine.newest is None and "Not a directory" in str(mine.problem)
