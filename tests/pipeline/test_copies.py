"""Copies of checkpoints with the neighbour: which steps survive the loss of a machine, and what is deleted when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from link.support import World, pair, wait_until
from thinwire.checkpoint import Position
from thinwire.checkpoint.hashes import file_sha256
from thinwire.pipeline.copies import Copies
from thinwire.pipeline.outcome import Outcome
from thinwire.train import Trainer

pytestmark = pytest.mark.timeout(60)


def write_part(run: Path, step: int, stage: int) -> str:
    """Put the files of a checkpoint in place."""
    folder = run / f"checkpoints/step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"stage-{stage}.safetensors").write_bytes(bytes(1000))
    (folder / f"stage-{stage}.json").write_text(f'{{"sha256": "{file_sha256(folder / f"stage-{stage}.safetensors")}"}}')
    return folder.name


def test_a_step_is_copied_when_its_keeper_has_it_whole(tmp_path):
    """Of two stages each keeps the other's; the first of more keeps nobody's."""
    with pair(World(tmp_path)) as (left, right, _):
        first, second = Copies(tmp_path / "first", 0, 2, None, left), Copies(tmp_path / "second", 1, 2, right, None)
        assert second.copied((4, 8)) == () == first.copied((4, 8))
        first.offer(write_part(tmp_path / "first", 4, 0))
        wait_until(lambda: second.copied((4, 8)) == (4,))
        assert first.copied((4, 8)) == ()  # the other way nothing was sent
        second.offer(write_part(tmp_path / "second", 8, 1))
        wait_until(lambda: first.copied((4, 8)) == (8,))
        assert second.held() == {"0": ["step-000004"]}
    for copies in (first, second):
        copies.close()
    with pair(World(tmp_path / "again")) as (left, _, _):
        alone = Copies(tmp_path / "alone", 0, 3, None, left)
        assert alone.copied((4, 8)) == (4, 8)
    alone.close()


class Disk:
    """A saver and a pipeline that note what they are told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.offered: list[str] = []
        self.problem = None

    def confirm(self, step: int) -> None:
        self.steps = [each for each in self.steps if each >= step]

    def drop(self, needless: list[int]) -> None:
        self.steps = [each for each in self.steps if each not in needless]

    def offer(self, name: str) -> None:
        self.offered.append(name)


@pytest.mark.parametrize("slow", [0, 1, 7], ids=lambda count: f"a copy takes {count} checkpoints")
def test_the_last_copied_checkpoint_stays_until_the_next_is_copied(tmp_path, slow):
    """However long a copy takes, everyone keeps the step of which there are copies, and the disk does not fill up."""
    disk, pipeline = Disk(), Disk()
    trainer = SimpleNamespace(saver=disk, pipeline=pipeline, confirmed=-1, offered=-1, problem=None)
    trainer.folder, trainer.position, trainer.facts = tmp_path, Position(0, 0.0), {"split": "1,1", "microbatches": 1}
    copied: set[int] = set()
    under_way: list[tuple[int, int]] = []
    for step in range(1, 40):
        disk.steps.append(step)
        copied |= {each for each, at in under_way if at <= step}
        before = len(pipeline.offered)
        Trainer.keep(trainer, Outcome(step, 0.0, 0.0, saved=tuple(disk.steps), copied=tuple(sorted(copied & {*disk.steps}))))
        if len(pipeline.offered) > before:
            under_way.append((int(pipeline.offered[-1][-6:]), step + slow))
        assert not copied or max(copied) in disk.steps
        assert disk.steps[-1] == step and len(disk.steps) <= 4
    assert len(copied) >= 39 // (slow + 2)
    assert pipeline.offered == sorted(set(pipeline.offered))
