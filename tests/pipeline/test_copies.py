"""What a neighbour may write here: its own checkpoints, no larger and no more of them than there can be use for."""

from __future__ import annotations

import hashlib
import json

import pytest

from thinwire.link.errors import ProtocolError
from thinwire.pipeline.copies import ENDINGS, MOST_COPIES, PIECE, Copies

LARGEST = 1000


def pieces(step: int, tensors: bytes = b"weights", stage: int = 1) -> list[bytes]:
    """Return the messages of one checkpoint."""
    name = f"step-{step:06d}".encode()
    manifest = json.dumps({"sha256": hashlib.sha256(tensors).hexdigest()}).encode()
    return [PIECE.pack(stage, number, len(name), 0, len(data)) + name + data for number, data in enumerate((tensors, manifest))]


@pytest.fixture
def copies(tmp_path):
    """Keep copies of a neighbour behind, whose link is not needed to write."""
    return Copies(tmp_path, 0, None, None, LARGEST)


def kept(copies: Copies) -> list[str]:
    return sorted(path.parent.name for path in copies.folder.glob(f"step-*/stage-1{ENDINGS[1]}"))


def take(copies: Copies, *messages: bytes) -> None:
    for message in messages:
        copies._write(1, message)


def test_a_neighbour_cannot_fill_the_disk(copies):
    for step in range(1, MOST_COPIES + 3):
        take(copies, *pieces(step))
    assert kept(copies) == [f"step-{step:06d}" for step in range(1, MOST_COPIES + 1)]


def test_what_was_begun_without_room_is_left_when_there_is_room_again(copies):
    for step in range(1, MOST_COPIES + 1):
        take(copies, *pieces(step))
    tensors, manifest = pieces(9)
    take(copies, tensors)
    for path in (copies.folder / "step-000001").iterdir():
        path.unlink()
    take(copies, manifest)
    assert "step-000009" not in kept(copies)
    take(copies, *pieces(10))
    assert "step-000010" in kept(copies)


def test_a_file_that_is_larger_than_any_checkpoint_is_refused(copies):
    with pytest.raises(ProtocolError, match="SNAPSHOT"):
        take(copies, *pieces(1, bytes(LARGEST + 1)))
    assert not copies.folder.exists()
