"""Copies of checkpoints with the neighbour: each worker sends its own to the next stage (the last to the one before), in spare bandwidth.

Files go over the bulk channel, which waits for every payload, in pieces that carry their place; a copy counts once its length and its
sha256 are what its manifest says. Knows files and links, not what is in the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import threading
from contextlib import suppress
from pathlib import Path

from thinwire.link.errors import LinkError, ProtocolError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.link import Link

PIECE = struct.Struct("<HBBQQ")
"""Stage, ending, length of the checkpoint's name, offset of the piece, length of the file; the name and the bytes follow."""
ENDINGS = (".safetensors", ".json")
PIECE_BYTES = 2**20
LARGEST = (2**40, 2**20)
"""Most bytes of each of the two files."""
NAME = re.compile(r"step-(\d{6,})[-0-9a-f]*")


def step_of(name: str) -> int:
    """Return the step in a checkpoint's name."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else -1


class Copies:
    """Send this stage's checkpoints to a neighbour, keep those of the neighbours, and give them back."""

    def __init__(self, run: Path, stage: int, left: Link | None, right: Link | None) -> None:
        """Keep copies in a run folder, beside the checkpoints of this stage."""
        self.folder, self.own, self.stage = run / "copies", run / "checkpoints", stage
        self.links = {stage + side: link for side, link in ((-1, left), (1, right)) if link is not None}
        self.keeper = right or left
        self.arrived = threading.Condition()
        self.back: set[str] = set()
        """This stage's own checkpoints that came back."""
        self.wanted: str | None = None
        self.ended = False
        self.threads = [threading.Thread(target=self._take, args=(link,), daemon=True) for link in self.links.values()]
        if self.keeper is not None:
            self.threads.append(threading.Thread(target=self._offer, daemon=True))
        for thread in self.threads:
            thread.start()

    def offer(self, name: str) -> None:
        """Send a checkpoint to the keeper when there is time; a newer one goes instead of one that waits."""
        with self.arrived:
            self.wanted = name
            self.arrived.notify_all()

    def held(self) -> dict[int, list[str]]:
        """List the checkpoints of which the copies are whole, by stage."""
        found: dict[int, list[str]] = {}
        for path in sorted(self.folder.glob("step-*/stage-*.json")):
            found.setdefault(int(path.stem.removeprefix("stage-")), []).append(path.parent.name)
        return found

    def confirm(self, step: int) -> None:
        """Delete the copies of older steps: every worker has a checkpoint of this one or a newer one."""
        for manifest in self.folder.glob("step-*/stage-*.json"):
            if step_of(manifest.parent.name) < step:
                manifest.unlink()
                manifest.with_suffix(".safetensors").unlink(missing_ok=True)
                with suppress(OSError):  # another stage's copy is still there
                    manifest.parent.rmdir()

    def give_back(self, stage: int, name: str) -> None:
        """Send a neighbour its own checkpoint."""
        self._send(self.links[stage], stage, self._folder(stage, name))

    def wait_for(self, name: str, timeout: float) -> None:
        """Wait until this stage's own checkpoint has come back."""
        with self.arrived:
            if not self.arrived.wait_for(lambda: name in self.back or self.ended, timeout) or name not in self.back:
                raise LinkError(f"the neighbour's copy of {name} did not arrive in {timeout} s; start the worker again")

    def close(self) -> None:
        """End once the links have: their threads wait for them."""
        with self.arrived:
            self.ended = True
            self.arrived.notify_all()

    def _folder(self, stage: int, name: str) -> Path:
        return (self.own if stage == self.stage else self.folder) / name

    def _offer(self) -> None:
        while True:
            with self.arrived:
                self.arrived.wait_for(lambda: self.wanted is not None or self.ended)
                if self.ended:
                    return
                name, self.wanted = self.wanted, None
            assert name is not None and self.keeper is not None
            try:
                self._send(self.keeper, self.stage, self._folder(self.stage, name))
            except FileNotFoundError:
                continue  # a newer one has taken its place
            except LinkError:
                return

    @staticmethod
    def _send(link: Link, stage: int, folder: Path) -> None:
        """Send both files of a checkpoint, the manifest last."""
        name = folder.name.encode()
        for number, ending in enumerate(ENDINGS):
            with (folder / f"stage-{stage}{ending}").open("rb") as file:
                total = os.fstat(file.fileno()).st_size
                offset = 0
                while data := file.read(PIECE_BYTES):
                    head = PIECE.pack(stage, number, len(name), offset, total) + name
                    link.send(Frame.make(Kind.SNAPSHOT, head + data, channel=Channel.BULK, epoch=link.epoch))
                    offset += len(data)

    def _take(self, link: Link) -> None:
        """Write the pieces that come over a link."""
        try:
            while True:
                frame = link.receive(Channel.BULK)
                if frame.header.kind is Kind.SNAPSHOT:
                    self._write(bytes(frame.payload))
        except ProtocolError as error:
            link.abort(str(error))
        except LinkError:
            self.close()

    def _write(self, piece: bytes) -> None:
        """Put a piece in its place, refusing any that is not the next one of a file that may come."""
        if len(piece) < PIECE.size:
            raise ProtocolError("SNAPSHOT", len(piece), f"at least {PIECE.size} bytes")
        stage, number, length, offset, total = PIECE.unpack_from(piece)
        name = piece[PIECE.size : PIECE.size + length].decode("ascii", "replace")
        known = stage in (*self.links, self.stage) and number < len(ENDINGS) and NAME.fullmatch(name)
        if not known or not 0 < total <= LARGEST[number]:
            raise ProtocolError("SNAPSHOT", (stage, name, number, total), "a file of a neighbour's checkpoint or of this stage's")
        folder, data = self._folder(stage, name), memoryview(piece)[PIECE.size + length :]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"stage-{stage}{ENDINGS[number]}.copy").open("r+b" if offset else "wb") as file:
            if os.fstat(file.fileno()).st_size != offset or offset + len(data) > total:
                raise ProtocolError("SNAPSHOT", offset, "the next piece of the file")
            file.seek(offset)
            file.write(data)
            done = file.tell() == total
            if done:
                file.flush()
                os.fsync(file.fileno())
        if done and number == len(ENDINGS) - 1:
            self._complete(folder, stage)

    def _complete(self, folder: Path, stage: int) -> None:
        """Put both files in place if the tensors are what the manifest says."""
        tensors, manifest = (folder / f"stage-{stage}{ending}.copy" for ending in ENDINGS)
        with tensors.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != json.loads(manifest.read_text()).get("sha256"):
                raise ProtocolError("SNAPSHOT", "another sha256", "that of its manifest")
        for path in (tensors, manifest):
            path.replace(path.with_suffix(""))
        if stage == self.stage:
            with self.arrived:
                self.back.add(folder.name)
                self.arrived.notify_all()
