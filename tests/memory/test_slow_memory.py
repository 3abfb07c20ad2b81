"""The slow memory: every bit comes back, nothing is left behind, and a disk that fails says so."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from patience import HANG
from thinwire.memory.slow_memory import ALIGNMENT, CHUNK, FileMemory, lies_in_memory, measure_bandwidth, open_nameless


def pieces(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


@pytest.mark.parametrize("sizes", [(1,), (4096,), (CHUNK, 1), (5, CHUNK - 5, 7), (3 * CHUNK + 17, 12, 2 * CHUNK)])
@pytest.mark.parametrize("direct", [True, False])
def test_every_bit_comes_back(tmp_path, monkeypatch, sizes, direct):
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
        monkeypatch.delattr(os, "O_TMPFILE")
    one, two = pieces(*sizes), pieces(*reversed(sizes))
    room = -(-sum(sizes) // ALIGNMENT) * ALIGNMENT
    slow = FileMemory(tmp_path, 2 * room)
    assert direct or not slow.direct
    slow.write(0, one)
    slow.write(room, two)
    for place, wanted in ((room, two), (0, one)):
        back = [torch.zeros_like(piece) for piece in wanted]
        slow.read(place, back)
        assert all(map(torch.equal, back, wanted))
    assert list(tmp_path.iterdir()) == []
    slow.close()


def test_a_killed_process_leaves_no_file(tmp_path):
    code = (
        "import sys, pathlib, torch, time; from thinwire.memory.slow_memory import FileMemory; "
        "slow = FileMemory(pathlib.Path(sys.argv[1]), 2**20); slow.write(0, [torch.ones(2**20, dtype=torch.uint8)]); "
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=HANG)
    assert list(tmp_path.iterdir()) == []


def fail(number: int):
    def call(*arguments, **named):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        (
            "posix_fallocate",
            errno.ENOSPC,
            r"cannot take 4\.0 MB .*No space left on device; make room there.*--memory.folder.*--memory.budget",
        ),
        ("posix_fallocate", errno.EDQUOT, "make room there"),
        ("open", errno.EROFS, "can be written to"),
    ],
)
def test_a_disk_without_room_is_refused_at_once(tmp_path, monkeypatch, name, number, text):
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    monkeypatch.setattr(os, name, fail(number))
    if name == "open":
        monkeypatch.setattr("tempfile.mkstemp", fail(number))
    with pytest.raises(ValueError, match=text) as caught:
        FileMemory(tmp_path, 4_000_000)
    assert str(tmp_path) in str(caught.value)
    monkeypatch.undo()
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        FileMemory(tmp_path / "nowhere", 1)


@pytest.mark.parametrize(("name", "word"), [("pwrite", "write"), ("preadv", "read")])
def test_an_error_in_the_middle_names_the_folder(tmp_path, monkeypatch, name, word):
    slow = FileMemory(tmp_path, CHUNK)
    monkeypatch.setattr(os, name, fail(errno.EIO))
    with pytest.raises(ValueError, match=rf"cannot {word} .*{tmp_path}.*Input/output error.*--memory.folder"):
        getattr(slow, word)(0, pieces(10))
    slow.close()


def test_transfers_that_come_in_parts_are_finished(tmp_path, monkeypatch):
    slow, (sent,) = FileMemory(tmp_path, 4 * ALIGNMENT), pieces(4 * ALIGNMENT)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: whole(file, data[:ALIGNMENT], place))
    slow.write(0, [sent])
    back = torch.zeros_like(sent)
    slow.read(0, [back])
    assert torch.equal(back, sent)
    slow.close()


def test_a_rate_holds_back_and_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("thinwire.memory.slow_memory.SAMPLE_BYTES", CHUNK)
    now = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr("thinwire.memory.slow_memory.time", clock)
    slow = measure_bandwidth(torch.device("cpu"), tmp_path, bytes_per_second=10 * CHUNK)
    assert now[0] == pytest.approx(100.6)  # three times out and in, a tenth of a second each
    assert (slow.out_bytes_per_second, slow.in_bytes_per_second) == pytest.approx((10 * CHUNK, 10 * CHUNK))


def test_a_file_without_a_name_has_none_from_the_start(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    file = open_nameless(Path(tmp_path))
    assert list(tmp_path.iterdir()) == [] and os.fstat(file).st_nlink == 0
    os.close(file)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_a_folder_in_memory_is_recognised(tmp_path):
    assert lies_in_memory(Path("/dev/shm"))
    assert not lies_in_memory(Path("/proc/self"))
