"""Copies of checkpoints with the neighbour: each worker sends its own to the next stage (the last to the one before), in spare bandwidth.

Files go over the bulk channel, which waits for every payload, in pieces that carry their offset; a copy counts once its length and its
sha256 are what its manifest says. Knows files and links, not what is in the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.link.errors import LinkError, ProtocolError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.link import Link
from thinwire.link.message import FLAG
from thinwire.pipeline.links import Links
from thinwire.pipeline.outcome import of_replica
from thinwire.pipeline.protocols import Group
from thinwire.util.checkpoint_name import is_checkpoint_name, step_of
from thinwire.util.disk import shortage
from thinwire.util.files import matching, read_small
from thinwire.util.notices import warn
from thinwire.util.runtime import REAL, Runtime
from thinwire.util.system import replace_file

LOG = logging.getLogger("thinwire.copies")
PIECE = struct.Struct("<HBBQQ")
"""Stage, ending, length of the checkpoint's name, offset of the piece, length of the file; the name and the bytes follow."""
ENDINGS = (".safetensors", ".json")
PIECE_BYTES = 2**20
MANIFEST_BYTES = 2**20
"""Most bytes of a manifest."""
MOST_COPIES = 4
"""Checkpoints of one neighbour that are kept at most: two that stay, and newer ones that not all workers have yet."""


class Copies:
    """Send this stage's checkpoints to a neighbour, keep those of the neighbours, and give them back."""

    def __init__(self, run: Path, stage: int, stages: int, links: Links, largest: int, group: Group, runtime: Runtime = REAL) -> None:
        """Keep copies of at most `largest` bytes in a run folder, beside the checkpoints of this stage; `open` begins."""
        self.largest, self.stages, self.group = (largest, MANIFEST_BYTES), stages, group
        left, right = links.left, links.right
        self.folder, self.own, self.stage = run / "copies", run / "checkpoints", stage
        self.links = {stage + side: link for side, link in ((-1, left), (1, right)) if link is not None}
        self.keeper = right or left
        self.whole: dict[int, set[int]] = {other: set() for other in self.links if other < stage or other == stages - 1}
        """For each neighbour whose keeper this is: the steps of which a copy has come since the links were made."""
        self.changed = runtime.condition()
        self.back: set[str] = set()
        """This stage's own checkpoints that came back."""
        self.expected: str | None = None
        """The one that is to come back."""
        self.decided = runtime.event()
        """Set once it is known which one that is, or that none is."""
        self.failed: dict[int, int] = {}
        """For each neighbour whose copies could not be written here: the step of the last of them."""
        self.broken: str | None = None
        """Why this stage's own checkpoint could not be written here."""
        self.wanted: str | None = None
        self.sent: dict[str, bool] = {}
        """Checkpoints that this stage is done with sending, and whether all of each is on its way."""
        self.over: dict[int, str] = {}
        """By stage the name of what a neighbour has sent to the end last, whether it could be kept or not."""
        self.safe = -1
        """Newest step of which every worker is known to have a checkpoint."""
        self.ended: str | None = None
        """Why nothing comes or goes any more."""
        self.threads = [runtime.thread(f"thinwire-copies {other}", partial(self._take, other, link)) for other, link in self.links.items()]
        if self.keeper is not None:
            self.threads.append(runtime.thread("thinwire-copies", self._offer))

    def open(self) -> None:
        """Take copies from now on, and send what is offered."""
        self._forget_begun(self.own, self.stage)
        for thread in self.threads:
            thread.start()

    def fetch(self, name: str, votes: Sequence[dict[str, Any]]) -> None:
        """Get this stage's checkpoint from a neighbour where it is missing here, and give neighbours theirs."""
        votes = of_replica(votes, self.group.replica, self.stages)
        self.expect(None if name in votes[self.stage]["steps"] else name)
        for stage, vote in enumerate(votes):
            if name in vote["steps"]:
                continue
            keepers = [other for other in (stage + 1, stage - 1) if 0 <= other < len(votes)]
            keeper = next((other for other in keepers if name in votes[other]["copies"].get(str(stage), [])), None)
            if keeper is None:
                raise ProtocolError("vote", f"{name} of stage {stage}", "a checkpoint that it has, or of which a neighbour keeps a copy")
            if self.stage == keeper:
                self.give_back(stage, name)
            if self.stage == stage:
                self.wait_for(name)

    def copy_last(self, name: str) -> None:
        """Send a checkpoint that all stages have to its keeper, and wait for those that belong here."""
        sent = of_replica(self.group.gather(self.send(name), FLAG), self.group.replica, self.stages)
        self.wait_for_copies(name, [stage for stage, done in enumerate(sent) if done])

    def expect(self, name: str | None) -> None:
        """Let one checkpoint of this stage come back from a neighbour, or none: nobody writes here what nobody waits for."""
        self.expected = name
        self.decided.set()

    def offer(self, name: str) -> None:
        """Send a checkpoint to the keeper when there is time; a newer one goes instead of one that waits."""
        self.decided.set()  # this stage has what it needs
        with self.changed:
            self.wanted = name
            self.changed.notify_all()

    def send(self, name: str) -> bool:
        """Send a checkpoint to the keeper; return, once the link has all of it or it cannot be sent, whether it has."""
        if self.keeper is None:
            return False
        self.sent.pop(name, None)
        self.offer(name)
        with self.changed:
            self.changed.wait_for(lambda: name in self.sent or self.ended is not None)
            return self.sent.get(name, False)

    def wait_for_copies(self, name: str, senders: Collection[int]) -> None:
        """Wait until what neighbours have sent of a checkpoint has come, if this is their keeper."""
        awaited = [stage for stage in self.whole if stage in senders]
        with self.changed:
            self.changed.wait_for(lambda: all(self.over.get(stage) == name for stage in awaited) or self.ended is not None)

    def held(self) -> dict[str, list[str]]:
        """List the checkpoints of which the copies are whole, by the number of the neighbour's stage, as JSON has its keys."""
        return {str(stage): [path.parent.name for path in self._manifests(stage) if self._is_whole(path)] for stage in self.links}

    def copied(self, steps: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of some steps of which the copies that belong here have come, whole."""
        return tuple(step for step in steps if all(step in whole for whole in self.whole.values()))

    def uncopied(self) -> tuple[int, ...]:
        """Return the steps of which a copy that belongs here could not be written, and will not come again."""
        return tuple(self.failed.values())

    def confirm(self, step: int) -> None:
        """Note that every worker has a checkpoint of this step: delete copies that are older than the newest one up to it."""
        self.safe = step
        for stage in self.links:
            older = sorted(each for path in self._manifests(stage) if (each := step_of(path.parent)) <= step)
            for folder in matching(self.folder, "step-*"):
                if older and step_of(folder) < older[-1]:
                    self._delete(folder, stage)

    def give_back(self, stage: int, name: str) -> None:
        """Send a neighbour its own checkpoint."""
        self._send(self.links[stage], stage, self.folder / name)

    def wait_for(self, name: str) -> None:
        """Wait until this stage's own checkpoint has come back."""
        if name not in self.back:
            self.expect(name)
        with self.changed:
            self.changed.wait_for(lambda: name in self.back or self.ended is not None)
            if self.broken is not None:
                raise ValueError(self.broken)
            if name not in self.back:
                raise LinkError(f"the neighbour's copy of {name} did not arrive: {self.ended}; start the worker again")

    def close(self) -> None:
        """End the threads; the links have ended already."""
        self._end("this worker has ended")
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()

    def _end(self, why: str) -> None:
        with self.changed:
            self.ended = self.ended or why
            self.changed.notify_all()
        self.decided.set()

    def _manifests(self, stage: int) -> list[Path]:
        return [path for path in self._parts(self.folder, f"stage-{stage}.json") if is_checkpoint_name(path.parent.name)]

    @staticmethod
    def _parts(folder: Path, pattern: str) -> list[Path]:
        """List files of all checkpoints in a folder; another thread may be deleting some."""
        return [path for each in matching(folder, "step-*") for path in matching(each, pattern)]

    def _offer(self) -> None:
        """Send what is offered, one checkpoint after the other."""
        assert self.keeper is not None
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.wanted is not None or self.ended is not None)
                if self.wanted is None or self.ended is not None:
                    return
                name, self.wanted = self.wanted, None
            done = False
            try:
                self._send(self.keeper, self.stage, self.own / name)
                done = True
            except LinkError:
                return
            except OSError as error:  # it was deleted, because a newer one is whole everywhere; or the disk fails, which the saver tells
                LOG.info("no copy of %s was sent: %s", name, error)
            with self.changed:
                self.sent[name] = done
                self.changed.notify_all()

    @staticmethod
    def _send(link: Link, stage: int, folder: Path) -> None:
        """Send both files of a checkpoint, the manifest last; both are opened first, so that a deletion does not leave half a copy."""
        name = folder.name.encode()
        with ExitStack() as stack:
            files = [stack.enter_context((folder / f"stage-{stage}{ending}").open("rb")) for ending in ENDINGS]
            for number, file in enumerate(files):
                total, offset = os.fstat(file.fileno()).st_size, 0
                while data := file.read(PIECE_BYTES):
                    head = PIECE.pack(stage, number, len(name), offset, total) + name
                    link.send(Frame.make(Kind.SNAPSHOT, head + data, channel=Channel.BULK, epoch=link.epoch))
                    offset += len(data)

    def _take(self, neighbour: int, link: Link) -> None:
        """Write the pieces that come over a link."""
        why = "its link has ended"
        try:
            while True:
                frame = link.receive(Channel.BULK)
                if frame.header.kind is Kind.SNAPSHOT:
                    piece = bytes(frame.payload)
                    self._write_or_forgo(neighbour, piece)
                    self._note_end(piece)
        except ProtocolError as error:
            why = str(error)
            link.abort(why, error.code)
        except LinkError:
            pass
        except OSError as error:  # this stage's own checkpoint, without which it cannot go on; the others can
            why = str(error)
        except ValueError as error:
            why = f"it cannot be read ({error})"
            link.abort(f"copies of checkpoints cannot be kept: {error}")
        finally:
            self._end(why)

    def _write_or_forgo(self, neighbour: int, piece: bytes) -> None:
        """Write a piece; where the disk does not take it, go without this copy of a neighbour's checkpoint, and say so."""
        try:
            self._write(neighbour, piece)
        except LinkError:
            raise
        except OSError as error:
            stage, _, length, _, total = PIECE.unpack_from(piece)
            name = piece[PIECE.size : PIECE.size + length].decode("ascii")
            folder = (self.own if stage == self.stage else self.folder) / name
            with suppress(OSError):
                for path in matching(folder, f"stage-{stage}.*.copy"):
                    path.unlink()
                folder.rmdir()
            reason = shortage(folder, error, total)
            if stage == self.stage:
                self.broken = f"the neighbour's copy of {name} could not be written to {folder}: {reason}, and start this worker again"
                raise
            if stage not in self.failed:
                warn(
                    f"the copy of stage {stage}'s checkpoint {name} was not written to {folder}: {reason}. Training goes on; until a newer "
                    f"copy can be written, stage {stage} has its checkpoints on its own disk alone"
                )
            self.failed[stage] = step_of(name)

    def _write(self, neighbour: int, piece: bytes) -> None:
        """Put a piece in its place, refusing any that is not the next one of a file that may come."""
        if len(piece) < PIECE.size:
            raise ProtocolError("SNAPSHOT", len(piece), f"at least {PIECE.size} bytes")
        stage, number, length, offset, total = PIECE.unpack_from(piece)
        name = piece[PIECE.size : PIECE.size + length].decode("ascii", "replace")
        known = stage in (neighbour, self.stage) and number < len(ENDINGS) and is_checkpoint_name(name)
        if not known or not 0 < total <= self.largest[number]:
            raise ProtocolError("SNAPSHOT", (stage, name, number, total), "a file of the neighbour's checkpoint or of this stage's")
        if stage == self.stage:
            self._refuse_unexpected(name)
        folder, data = (self.own if stage == self.stage else self.folder) / name, memoryview(piece)[PIECE.size + length :]
        path = folder / f"stage-{stage}{ENDINGS[number]}.copy"
        if offset == 0 and number == 0:
            self._forget_begun(folder.parent, stage)  # checkpoints come one after the other: what is not finished now never will be
            self.over.pop(stage, None)
        if stage != self.stage and offset and not path.exists():
            return  # its beginning could not be written
        if offset and not path.exists():
            raise ProtocolError("SNAPSHOT", offset, "the next piece of the file", f"{name} has no beginning")
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if offset else "wb") as file:
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

    def _refuse_unexpected(self, name: str) -> None:
        """Refuse a piece of this stage's own checkpoint, unless it is the one that is to come back; the votes may still be on their way."""
        self.decided.wait()
        if name != self.expected:
            raise ProtocolError("SNAPSHOT", name, "a checkpoint that this stage waits for")

    @staticmethod
    def _forget_begun(folder: Path, stage: int) -> None:
        """Delete what came of a stage's checkpoints and was not finished."""
        for path in Copies._parts(folder, f"stage-{stage}.*.copy"):
            path.unlink(missing_ok=True)
            with suppress(OSError):  # there is something else in it
                path.parent.rmdir()

    def _note_end(self, piece: bytes) -> None:
        """Remember that the last piece of a checkpoint has come."""
        stage, number, length, offset, total = PIECE.unpack_from(piece)
        if number == len(ENDINGS) - 1 and offset + len(piece) - PIECE.size - length == total:
            with self.changed:
                self.over[stage] = piece[PIECE.size : PIECE.size + length].decode()
                self.changed.notify_all()

    def _make_room(self, stage: int, newest: Path) -> None:
        """Let the oldest copies of a neighbour go when there are more than anyone can need; the last one that is safe stays."""
        folders = sorted({path.parent for path in self._parts(self.folder, f"stage-{stage}.*")}, key=lambda folder: step_of(folder))
        safe = [folder for folder in folders if step_of(folder) <= self.safe][-1:]
        for folder in [folder for folder in folders if folder not in (newest, *safe)][: max(0, len(folders) - MOST_COPIES)]:
            self._delete(folder, stage)

    @staticmethod
    def _delete(folder: Path, stage: int) -> None:
        """Delete the copy of one stage, and the folder with the last one."""
        with suppress(OSError):  # what stays too long does no harm
            for path in matching(folder, f"stage-{stage}.*"):  # the manifest before the tensors it vouches for
                path.unlink()
            folder.rmdir()

    def _complete(self, folder: Path, stage: int) -> None:
        """Put both files in place if the tensors are what the manifest says."""
        tensors, manifest = (folder / f"stage-{stage}{ending}.copy" for ending in ENDINGS)
        if not tensors.exists():  # there was no room when its tensors came
            manifest.unlink()
            return
        if not self._is_whole(manifest, tensors):
            raise ProtocolError("SNAPSHOT", "another sha256", "that of its manifest")
        for path in (tensors, manifest):
            replace_file(path, path.with_suffix(""))
        if stage == self.stage:
            self.expected = None
            with self.changed:
                self.back.add(folder.name)
                self.changed.notify_all()
            return
        self._make_room(stage, folder)
        if stage in self.whole:
            self.whole[stage].add(step_of(folder))
            self.failed.pop(stage, None)

    @staticmethod
    def _is_whole(manifest: Path, tensors: Path | None = None) -> bool:
        """Tell whether the tensors are those that a manifest vouches for."""
        try:
            with (tensors or manifest.with_suffix(".safetensors")).open("rb") as file:
                wanted = json.loads(read_small(manifest, MANIFEST_BYTES))["sha256"]
                return hashlib.file_digest(file, "sha256").hexdigest() == wanted
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False
