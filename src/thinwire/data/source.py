"""Find the text or the token shards that `data.source` names, and split text into training and validation.

Reads text in pieces, never a large file whole. Not here: tokens (`tokenize.py`), the shard layout (`shards.py`), Hugging Face (`hub.py`).
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from thinwire.util.files import files_below

Split = Literal["train", "validation"]

# Folders that distributions strip or fill with other things; without them most Pythons of one version give the same text.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Span:
    """A range of bytes of a text file: one document."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class FileSource:
    """Hold the documents of both splits and a sha256 over their names and bytes."""

    name: str
    digest: str
    train: tuple[Span, ...]
    validation: tuple[Span, ...]

    @property
    def train_bytes(self) -> int:
        return sum(span.stop - span.start for span in self.train)

    def pieces(self, split: Split) -> Iterator[tuple[str, bool]]:
        """Yield pieces of text with whether each one ends its document."""
        for span in self.train if split == "train" else self.validation:
            yield from read_pieces(span)

    def numbered(self, split: Split, first: int) -> Iterator[tuple[str, tuple[int, bool]]]:
        """Yield pieces of text from number `first` on, with their numbers and whether each one ends its document."""
        for number, (text, ends) in islice(enumerate(self.pieces(split)), first, None):
            yield text, (number, ends)


def in_validation(key: str) -> bool:
    """Pick about a tenth of all keys, the same ones on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big") % 10 == 0


def find_files(pattern: str) -> list[Path]:
    """Return the files a path or glob names, sorted, or say what is wrong with it."""
    expanded = os.path.expanduser(pattern)
    if os.path.isdir(expanded):
        raise ValueError(f"data.source {pattern!r} is a folder: name the files in it, such as '{pattern.rstrip('/')}/**/*.txt'")
    names = [expanded] if os.path.isfile(expanded) else glob.glob(expanded, recursive=True)
    paths = sorted((Path(name) for name in names if os.path.isfile(name)), key=lambda path: path.as_posix())
    if not paths:
        raise ValueError(
            f"data.source {pattern!r} matches no file (looked from {os.getcwd()}): check the path, quote a glob in the shell, "
            f"or use 'stdlib' or 'hf:NAME'"
        )
    return paths


def open_stdlib() -> FileSource:
    """Open the source text of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata* is written by the build of this Python: other text on every machine
    files = [path for path in files_below(root, SKIPPED_FOLDERS) if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")]
    source = open_files("stdlib", files, root, skip_undecodable=True)
    if not source.train_bytes:
        raise ValueError(f"data.source 'stdlib': no .py files under {root}: give a text file, such as --data.source 'notes/*.txt'")
    return source


def open_text(pattern: str, paths: Sequence[Path]) -> FileSource:
    """Open text files that the user named."""
    source = open_files(pattern, paths, Path(os.path.commonpath([path.parent for path in paths])), skip_undecodable=False)
    if not source.train_bytes:
        raise ValueError(f"data.source {pattern!r}: {paths[0]} is empty ({len(paths)} file(s), 0 bytes): give files with text in them")
    return source


def open_files(name: str, paths: Sequence[Path], root: Path, skip_undecodable: bool) -> FileSource:
    """Hash the files and split them by the hash of their path, or at nine tenths of the text when that split is lopsided."""
    digest = hashlib.sha256()
    train: list[Span] = []
    validation: list[Span] = []
    for relative, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        try:
            size, content = hash_text(path)
        except UnicodeDecodeError as error:
            if skip_undecodable:
                continue
            raise ValueError(
                f"{path} is not UTF-8 text ({error.reason}): convert it, such as with 'iconv -t utf-8', or leave it out of data.source"
            ) from error
        digest.update(f"{relative}\0{size}\0{content}\n".encode("utf-8", "surrogateescape"))
        if size:
            (validation if in_validation(relative) else train).append(Span(path, 0, size))
    share = sum(span.stop for span in validation) / max(1, sum(span.stop for span in train + validation))
    # with few files a hash can leave a side empty or give the largest file to validation
    if not 0.02 <= share <= 0.3:
        train, validation = cut_tail(sorted(train + validation, key=lambda span: span.path.relative_to(root).as_posix()))
    return FileSource(name, digest.hexdigest(), tuple(train), tuple(validation))


def cut_tail(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Split documents so that the last tenth of the bytes is validation."""
    total = sum(span.stop for span in spans)
    left = total - total // 10
    train, validation = [], []
    for span in spans:
        cut = min(left, span.stop)
        if 0 < cut < span.stop:
            cut = character_start(span.path, cut)
        left = max(0, left - span.stop)
        train.append(Span(span.path, 0, cut))
        validation.append(Span(span.path, cut, span.stop))
    return [span for span in train if span.start < span.stop], [span for span in validation if span.start < span.stop]


def character_start(path: Path, offset: int) -> int:
    """Return the first offset from `offset` on at which a UTF-8 character starts."""
    with open(path, "rb") as file:
        file.seek(offset)
        for byte in file.read(4):
            if byte & 0xC0 != 0x80:
                break
            offset += 1
    return offset


def hash_text(path: Path) -> tuple[int, str]:
    """Return the size and sha256 of a file, raising UnicodeDecodeError unless it is UTF-8."""
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(PIECE_BYTES):
                digest.update(block)
                decoder.decode(block)
                size += len(block)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): check its permissions, or leave it out of data.source") from error
    decoder.decode(b"", final=True)
    return size, digest.hexdigest()


def read_pieces(span: Span) -> Iterator[tuple[str, bool]]:
    """Yield a document in pieces of about 1 MB that end at a line end where there is one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    left = span.stop - span.start
    text = ""
    with open(span.path, "rb") as file:
        file.seek(span.start)
        while left:
            block = file.read(min(PIECE_BYTES, left))
            if not block:
                raise ValueError(f"{span.path} became shorter while it was read: start again when nothing writes to it")
            left -= len(block)
            text += decoder.decode(block, final=not left)
            if left:
                cut = text.rfind("\n") + 1 or len(text)
                yield text[:cut], False
                text = text[cut:]
    yield text, True
