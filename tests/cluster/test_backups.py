"""Copies of checkpoints with the neighbour: which steps survive the loss of a machine, what is deleted when, what a neighbour may write."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from disks import fill, mounted
from link.support import World, pair
from patience import HANG, wait_until
from thinwire.checkpoint import Position
from thinwire.checkpoint.hashes import file_sha256
from thinwire.cluster.backups import ENDINGS, MOST_COPIES, PIECE, Copies
from thinwire.link.errors import LinkError, ProtocolError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.link import Link
from thinwire.pipeline.alone import GroupAlone
from thinwire.pipeline.links import Links
from thinwire.pipeline.outcome import Outcome
from thinwire.run.keeping import Keeper

LARGEST = 1000


def opened(run: Path, stage: int, stages: int, left: Link | None, right: Link | None, largest: int) -> Copies:
    """Keep copies for, and with, the neighbours at these links."""
    copies = Copies(run, stage, stages, Links(left, right, {}), largest, GroupAlone())
    copies.open()
    return copies


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
        first, second = opened(tmp_path / "first", 0, 2, None, left, LARGEST), opened(tmp_path / "second", 1, 2, right, None, LARGEST)
        assert second.copied((4, 8)) == () == first.copied((4, 8))
        first.offer(write_part(tmp_path / "first", 4, 0))
        wait_until(lambda: second.copied((4, 8)) == (4,))
        assert first.copied((4, 8)) == ()  # the other way nothing was sent
        second.offer(write_part(tmp_path / "second", 8, 1))
        wait_until(lambda: first.copied((4, 8)) == (8,))
        assert second.held() == {"0": ["step-000004"]}
        end((left, right), (first, second))
    with pair(World(tmp_path / "again")) as (left, right, _):
        alone = opened(tmp_path / "alone", 0, 3, None, left, LARGEST)
        assert alone.copied((4, 8)) == (4, 8)
        end((left, right), (alone,))


def end(links: tuple[Link, ...], copies: tuple[Copies, ...]) -> None:
    """End the threads of copies, which wait for their links to end, before anyone looks for threads that were left behind."""
    for each in (*links, *copies):
        each.close()


class Disk:
    """A saver and backups that note what they are told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.offered: list[str] = []
        self.everyone = -1
        self.problem = None

    def confirm(self, step: int, spare: tuple[int, ...] = ()) -> None:
        self.steps = [each for each in self.steps if each >= step or each in spare]

    def offer(self, name: str) -> None:
        self.offered.append(name)


def keeper_of(folder: Path, disk: Disk, backups: Disk) -> Keeper:
    """Make a keeper with this saver and these backups and nothing else."""
    keeper = Keeper.__new__(Keeper)
    keeper.saver, keeper.backups, keeper.confirmed, keeper.offered, keeper.kept, keeper.problem = disk, backups, -1, -1, (), None
    keeper.folder, keeper.facts = folder, {"split": "1,1", "microbatches": 1}
    return keeper


@pytest.mark.parametrize("slow", [0, 1, 7], ids=lambda count: f"a copy takes {count} checkpoints")
def test_the_last_copied_checkpoint_stays_until_the_next_is_copied(tmp_path, slow):
    """However long a copy takes, everyone keeps the step of which there are copies, and the disk does not fill up."""
    disk, backups = Disk(), Disk()
    keeper = keeper_of(tmp_path, disk, backups)
    copied: set[int] = set()
    under_way: list[tuple[int, int]] = []
    for step in range(1, 40):
        disk.steps.append(step)
        copied |= {each for each, at in under_way if at <= step}
        before = len(backups.offered)
        outcome = Outcome(step, 0.0, 0.0, saved=tuple(disk.steps), copied=tuple(sorted(copied & {*disk.steps})))
        keeper.keep(outcome, Position(0, 0.0))
        if len(backups.offered) > before:
            under_way.append((int(backups.offered[-1][-6:]), step + slow))
        assert not copied or max(copied) in disk.steps
        assert disk.steps[-2:] == [step - 1, step][-len(disk.steps) :]
        assert set(disk.steps[:-2]) <= {max(copied, default=-1), int(backups.offered[-1][-6:])}, "two, the one that is copied, the next one"
    assert len(copied) >= 39 // (slow + 2)
    assert backups.offered == sorted(set(backups.offered))


def test_a_copy_that_no_disk_takes_is_told_and_a_newer_one_is_taken(tmp_path, capsys):
    """The link lives on, the keeper says which step it has not, and that all may offer a newer one."""
    with mounted(tmp_path / "disk") as disk:
        run = disk / "run"
        copies = opened(run, 0, 2, None, None, 2**20)
        copies.links, copies.whole = {1: None}, {1: set()}
        filler = fill(disk)
        for piece in (*pieces(3, bytes(2**16)), *pieces(6, bytes(2**16))):
            copies._write_or_forgo(1, piece)
        error = capsys.readouterr().err
        assert error.count("the copy of stage 1's checkpoint step-000003 was not written") == 1 and "step-000006" not in error
        assert "No space left on device" in error and "make room there" in error and "65.5 KB are needed" in error
        assert copies.uncopied() == (6,) and not list(run.glob("copies/step-*/stage-1.*"))
        filler.unlink()
        for piece in pieces(9, bytes(2**16)):
            copies._write_or_forgo(1, piece)
        assert copies.uncopied() == () and copies.copied((6, 9)) == (9,) and copies.held() == {"1": ["step-000009"]}
        copies.close()


def test_a_step_that_a_keeper_could_not_write_makes_way_for_a_newer_one(tmp_path):
    disk, pipeline = Disk(), Disk()
    keeper = keeper_of(tmp_path, disk, pipeline)
    for saved, uncopied in (((3,), ()), ((3, 6), ()), ((3, 6), (3,)), ((3, 6, 9), (3,)), ((3, 6, 9), (6,))):
        keeper.keep(Outcome(9, 0.0, 0.0, saved=saved, uncopied=uncopied), Position(0, 0.0))
    assert pipeline.offered == ["step-000003", "step-000006", "step-000009"]


def pieces(step: int, tensors: bytes = b"weights", stage: int = 1) -> list[bytes]:
    """Return the messages of one checkpoint."""
    name = f"step-{step:06d}".encode()
    manifest = json.dumps({"sha256": hashlib.sha256(tensors).hexdigest()}).encode()
    return [PIECE.pack(stage, number, len(name), 0, len(data)) + name + data for number, data in enumerate((tensors, manifest))]


@pytest.fixture
def copies(tmp_path):
    """Keep copies of a neighbour behind, whose link is not needed to write."""
    return opened(tmp_path, 0, 2, None, None, LARGEST)


def kept(copies: Copies) -> list[str]:
    return sorted(path.parent.name for path in copies.folder.glob(f"step-*/stage-1{ENDINGS[1]}"))


def take(copies: Copies, *messages: bytes) -> None:
    for message in messages:
        copies._write(1, message)


def test_a_neighbour_cannot_fill_the_disk(copies):
    for step in range(1, MOST_COPIES + 3):
        take(copies, *pieces(step))
    assert kept(copies) == [f"step-{step:06d}" for step in range(3, MOST_COPIES + 3)]


def test_the_newest_copy_and_the_last_safe_one_stay(copies):
    """When copies of some checkpoints went nowhere else, those between the safe one and the newest give way, and copying goes on."""
    take(copies, *pieces(1))
    copies.confirm(1)
    for step in range(2, MOST_COPIES + 5):
        take(copies, *pieces(step))
        assert copies.copied((step,)) == (step,)
    assert kept(copies) == ["step-000001", *(f"step-{step:06d}" for step in range(6, MOST_COPIES + 5))]


def test_what_was_begun_without_room_is_left_when_there_is_room_again(copies):
    tensors, manifest = pieces(9)
    take(copies, tensors)
    (copies.folder / "step-000009/stage-1.safetensors.copy").unlink()
    take(copies, manifest)
    assert "step-000009" not in kept(copies)
    take(copies, *pieces(10))
    assert "step-000010" in kept(copies)


def files(copies: Copies) -> list[Path]:
    return [path for folder in (copies.folder, copies.own) for path in folder.rglob("*") if path.is_file()]


def test_a_neighbour_that_finishes_nothing_cannot_fill_the_disk(copies):
    for step in range(1, 30):
        take(copies, PIECE.pack(1, 0, 11, 0, LARGEST) + f"step-{step:06d}".encode() + bytes(LARGEST - 1))
    assert [path.parent.name for path in files(copies)] == ["step-000029"], "what was begun before it will never be finished"
    take(copies, *pieces(30), *pieces(30), *pieces(31))
    take(copies, PIECE.pack(1, 0, 11, 0, LARGEST) + b"step-000031" + bytes(9))
    assert len(files(copies)) == 5, "two whole copies, and what was begun again"


def test_a_neighbour_cannot_write_pieces_of_this_stage_that_nobody_waits_for(copies):
    copies.expect(None)
    for step in range(1, 30):
        with pytest.raises(ProtocolError, match="a checkpoint that this stage waits for"):
            take(copies, *pieces(step, stage=0))
    assert not files(copies)


def test_of_this_stage_only_the_checkpoint_that_is_waited_for_comes_back_and_once(copies):
    copies.expect("step-000007")
    take(copies, *pieces(7, stage=0))
    copies.wait_for("step-000007")
    assert sorted(path.name for path in files(copies)) == ["stage-0.json", "stage-0.safetensors"]
    for step in (7, 8):
        with pytest.raises(ProtocolError, match="a checkpoint that this stage waits for"):
            take(copies, *pieces(step, stage=0))


def test_what_was_left_of_a_checkpoint_that_did_not_come_back_goes(tmp_path):
    left = tmp_path / "checkpoints/step-000003/stage-0.safetensors.copy"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    opened(tmp_path, 0, 2, None, None, LARGEST)
    assert not left.exists() and not left.parent.exists()


NESTED = b'{"sha256": ' + b"[" * 100_000


@pytest.mark.parametrize("manifest", [NESTED, b"\xff", b"[]", b'{"sha256": NaN}', b'{"sha256": "\\ud800"}', b"1" * 5000])
def test_a_manifest_that_is_none_is_refused_by_name_at_both_ends(tmp_path, manifest):
    """And ends no thread in silence: whoever waits for a copy is told why none comes."""
    with pair(World(tmp_path)) as (left, right, _):
        keeper = opened(tmp_path / "keeper", 1, 2, right, None, LARGEST)
        name = b"step-000004"
        for number, data in enumerate((b"weights", manifest)):
            piece = PIECE.pack(0, number, len(name), 0, len(data)) + name + data
            left.send(Frame.make(Kind.SNAPSHOT, piece, channel=Channel.BULK), HANG)
        with pytest.raises(LinkError, match="SNAPSHOT is another sha256"):
            left.receive(Channel.CONTROL, HANG)
        with pytest.raises(LinkError, match=r"did not arrive.*SNAPSHOT is another sha256"):
            keeper.wait_for("step-000002")
        end((left, right), (keeper,))
        assert keeper.copied((4,)) == () and not list((tmp_path / "keeper").rglob("*.json"))


def test_pieces_of_this_stage_wait_until_it_is_known_whether_they_are_wanted(tmp_path):
    """The neighbour may have counted the votes first."""
    with pair(World(tmp_path)) as (left, right, _):
        first, second = opened(tmp_path / "first", 0, 2, None, left, LARGEST), opened(tmp_path / "second", 1, 2, right, None, LARGEST)
        name = write_part(tmp_path / "first", 4, 0)
        first.offer(name)
        wait_until(lambda: second.copied((4,)) == (4,))
        shutil.rmtree(tmp_path / "first/checkpoints")
        first.decided.clear()
        second.give_back(0, name)
        first.expect(name)
        first.wait_for(name)
        assert (tmp_path / "first/checkpoints" / name / "stage-0.json").exists()
        end((left, right), (first, second))


def test_a_file_that_is_larger_than_any_checkpoint_is_refused(copies):
    with pytest.raises(ProtocolError, match="SNAPSHOT"):
        take(copies, *pieces(1, bytes(LARGEST + 1)))
    assert not copies.folder.exists()
