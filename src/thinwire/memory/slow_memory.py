"""Slow memory: where a stage's activations wait for their backward. A file for a CPU stage, pinned host memory for a stage on a card.

It is one run of bytes; `offload.py` says what lies where and is the only caller, from its one thread. A piece is a flat tensor of bytes.
The file has no name from the moment it is open, so nothing is left of it however the process ends. Pinned memory was tried on the strict
device of the tests, not on a card: the machines this was made on have none.
"""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.memory.blocks import Bandwidth
from thinwire.util.device import pins
from thinwire.util.system import leave_page_cache, read_at, write_at

CHUNK = 2**20
"""Bytes that move at once; the one buffer of a file."""
ALIGNMENT = 4096
"""What direct reads and writes ask of places, lengths and addresses."""
SAMPLE_BYTES = 16 * 2**20
MEASURE_SECONDS = 3.0
"""How much is written and read to measure the bandwidth, and how long that may go on."""


def aligned(size: int) -> int:
    """Round up to whole blocks of a disk."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class FileMemory:
    """Slow memory in a file without a name: allocated at once, past the page cache where the file system permits."""

    def __init__(self, folder: Path, size: int, bytes_per_second: float | None = None) -> None:
        """Allocate `size` bytes in a folder; a rate makes the file as slow as that, for benches and tests."""
        self.folder, self.size, self.rate = folder, aligned(size), bytes_per_second
        self.moved = 0
        """Bytes copied so far: it grows while the disk answers."""
        self._buffer = mmap.mmap(-1, CHUNK)  # memory of its own pages: direct transfers need aligned addresses
        self._chunk = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._due = 0.0
        self._file = -1
        try:
            self._file = open_nameless(self.folder)
            allocate(self._file, self.size)
            self.direct = make_direct(self._file, self._buffer)
        except OSError as error:
            self.close()
            raise self._problem("cannot take", self.size, error) from error

    def mark(self) -> None:
        """Return nothing: on a CPU what is there is computed."""

    def write(self, place: int, pieces: Sequence[Tensor], mark: Any = None) -> None:
        """Copy the pieces, one behind the other, to a place."""
        for filled, parts in cut_chunks(pieces):
            started = time.monotonic()
            for start, part in parts:
                self._chunk[start : start + len(part)].copy_(part)
            self._move(write_at, "cannot write", place, aligned(filled))
            self._hold_back(filled, started)
            place += filled

    def read(self, place: int, pieces: Sequence[Tensor]) -> None:
        """Fill the pieces from a place."""
        for filled, parts in cut_chunks(pieces):
            started = time.monotonic()
            self._move(read_at, "cannot read", place, aligned(filled))
            for start, part in parts:
                part.copy_(self._chunk[start : start + len(part)])
            self._hold_back(filled, started)
            place += filled

    def _move(self, how: Callable[[int, memoryview, int], int], what: str, place: int, size: int) -> None:
        """Write or read the first bytes of the buffer."""
        window, done = memoryview(self._buffer)[:size], 0
        try:
            while done < size:
                count = how(self._file, window[done:], place + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file has ended")
                done += count
            if not self.direct:
                leave_page_cache(self._file, place, size, written=how is write_at)
        except OSError as error:
            raise self._problem(what, size, error) from error
        self.moved += size

    def _hold_back(self, size: int, started: float) -> None:
        """Wait until a disk of the given rate would be done."""
        if self.rate is not None:
            self._due = max(self._due, started) + size / self.rate
            time.sleep(max(0.0, self._due - time.monotonic()))

    def _problem(self, what: str, size: int, error: OSError) -> ValueError:
        """Put an error of the disk into words."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "make room there" if full else "see that it is a folder on a working disk that can be written to"
        return ValueError(
            f"{what} {size / 1e6:.1f} MB of the {self.size / 1e6:.1f} MB of slow memory in {self.folder}: {error.strerror or error}; "
            f"{advice}, choose another --memory.folder, or raise --memory.budget so that less is offloaded"
        )

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def cut_chunks(pieces: Sequence[Tensor]) -> Iterator[tuple[int, list[tuple[int, Tensor]]]]:
    """Cut pieces into runs of at most a chunk: its length, and which parts stand where in it."""
    filled: int = 0
    parts: list[tuple[int, Tensor]] = []
    for piece in pieces:
        taken = 0
        while taken < len(piece):
            count = min(CHUNK - filled, len(piece) - taken)
            parts.append((filled, piece[taken : taken + count]))
            filled, taken = filled + count, taken + count
            if filled == CHUNK:
                yield filled, parts
                filled, parts = 0, []
    if filled:
        yield filled, parts


def open_nameless(folder: Path) -> int:
    """Open a file that no folder lists."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # not every file system has it; what else is wrong shows below
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    if hasattr(os, "O_TEMPORARY"):  # Windows deletes no open file, but can be told to delete one when it is closed
        name = folder / f".thinwire-{uuid.uuid4().hex}"
        return os.open(name, os.O_TEMPORARY | os.O_BINARY | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # type: ignore[attr-defined]
    file, path = tempfile.mkstemp(prefix=".thinwire-", dir=folder)
    os.unlink(path)
    return file


def make_direct(file: int, buffer: mmap.mmap) -> bool:
    """Let a file go past the page cache; return whether its file system can."""
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl  # not at the top: there is none where there is no O_DIRECT

    before = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, before | os.O_DIRECT)
        write_at(file, memoryview(buffer)[:ALIGNMENT], 0)  # some accept the flag and then no transfer
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, before)
        return False
    return True


def allocate(file: int, size: int) -> None:
    """Take the room at once: a disk that is too full shows here and not in the middle of a step."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, max(size, ALIGNMENT))
        return
    for place in range(0, size, CHUNK):
        write_at(file, memoryview(bytes(min(CHUNK, size - place))), place)


def lies_in_memory(folder: Path) -> bool:
    """Tell whether what is written to a folder stays in memory, as far as the system says."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    mounts = {Path(line.split()[1]): line.split()[2] for line in lines}
    place = folder.resolve()
    return next((mounts[part] for part in (place, *place.parents) if part in mounts), "") in ("tmpfs", "ramfs")


class PinnedMemory:
    """Slow memory of a stage on a card: host memory that the device copies to and from on a stream of its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device, self.moved = aligned(size), device, 0
        try:
            self._memory: Tensor | None = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise ValueError(
                f"cannot pin {self.size / 1e6:.1f} MB of host memory: {error}; raise --memory.budget so that less is offloaded"
            ) from error
        self._stream = torch.Stream(device)

    def mark(self) -> Any:
        """Return a point in the computation, after which the tensors made so far can be copied."""
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def write(self, place: int, pieces: Sequence[Tensor], mark: Any = None) -> None:
        self._copy(place, pieces, mark, out=True)

    def read(self, place: int, pieces: Sequence[Tensor]) -> None:
        # The pieces may lie where an operation that is still queued reads: wait for the computation as it is now.
        self._copy(place, pieces, self.mark(), out=False)

    def _copy(self, place: int, pieces: Sequence[Tensor], mark: Any, *, out: bool) -> None:
        assert self._memory is not None
        with self._stream:
            self._stream.wait_event(mark)
            for piece in pieces:
                here = self._memory[place : place + len(piece)]
                source, target = (piece, here) if out else (here, piece)
                target.copy_(source, non_blocking=True)
                piece.record_stream(self._stream)
                place += len(piece)
        self._stream.synchronize()
        self.moved += sum(len(piece) for piece in pieces)

    def close(self) -> None:
        self._memory = None


SlowMemory = FileMemory | PinnedMemory


def open_slow_memory(device: torch.device, folder: Path, size: int, bytes_per_second: float | None = None) -> SlowMemory:
    """Take slow memory for a stage on a device: host memory where the device copies to it by itself, else a file in the folder."""
    return PinnedMemory(size, device) if pins(device) else FileMemory(folder, size, bytes_per_second)


def measure_bandwidth(device: torch.device, folder: Path, bytes_per_second: float | None = None) -> Bandwidth:
    """Write and read a sample a few times; return the middle rate of each direction."""
    slow = open_slow_memory(device, folder, SAMPLE_BYTES, bytes_per_second)
    sample = torch.arange(SAMPLE_BYTES // 8, device=device).view(torch.uint8)  # no run of zeros that a clever disk leaves out
    rates: dict[str, list[float]] = {"out": [], "in": []}
    started = time.monotonic()
    try:
        while len(rates["in"]) < 3 and time.monotonic() - started < MEASURE_SECONDS:
            for way, move in (("out", lambda: slow.write(0, [sample], slow.mark())), ("in", lambda: slow.read(0, [sample]))):
                before = time.monotonic()
                move()
                rates[way].append(SAMPLE_BYTES / (time.monotonic() - before))
    finally:
        slow.close()
    return Bandwidth(statistics.median(rates["out"]), statistics.median(rates["in"]), duplex=False)
