"""Safetensors files, written and read a few rows at a time: neither a shard nor a large tensor is ever whole in memory.

The library's own writer takes a whole file's tensors at once. The format is simple enough to stream: eight bytes with the length of a
JSON header, the header, then the tensors one behind another. Reading, and with it every check of a header, is the library's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CHUNK_BYTES = 4 << 20
CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
CODES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
KINDS = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Piece:
    """A tensor to be written: its form, and a function that makes rows `start` to `stop` of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[Tensor]:
        """Yield the rows in order, a few megabytes at a time; a tensor without axes counts as one row."""
        count = self.shape[0] if self.shape else 1
        together = max(1, CHUNK_BYTES // max(1, self.size // max(1, count)))
        for start in range(0, count, together):
            made = self.rows(start, min(start + together, count))
            chunk = made.to(self.dtype).contiguous()
            if made.dtype != self.dtype and not bool(torch.isfinite(chunk).all()) and bool(torch.isfinite(made).all()):
                raise ValueError(f"{self.name} has values that {self.dtype} cannot hold; choose another --dtype, such as bf16 or fp32")
            yield chunk


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file. The file is opened anew for every read, so that mapped pages are let go."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: a number format that this package has no use for."""
    code: str

    def rows(self, start: int, stop: int) -> Tensor:
        """Read some rows into memory of their own."""
        try:
            with safe_open(self.path, "pt") as file:
                return file.get_slice(self.name)[start:stop].clone() if self.shape else file.get_tensor(self.name).reshape(1).clone()
        except FileNotFoundError:
            raise ValueError(f"{self.path} was deleted while it was read: its run goes on and keeps only newer ones; try again") from None

    def whole(self) -> Tensor:
        """Read all of it."""
        return self.rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)

    def piece(self) -> Piece:
        """Return it as something to write."""
        assert self.dtype is not None
        return Piece(self.name, self.shape, self.dtype, self.rows)


def list_tensors(path: Path, advice: str) -> dict[str, Stored]:
    """List the tensors of a file; `advice` says what to do if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            forms = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); {advice}") from None
    return {name: Stored(path, name, shape, KINDS.get(code), code) for name, (shape, code) in forms.items()}


def write_file(path: Path, pieces: Iterable[Piece]) -> str:
    """Write tensors into a new file; return its sha256."""
    pieces = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)  # so that every tensor is aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for piece in pieces:
        place = [offset, offset := offset + piece.size]
        header[piece.name] = {"dtype": CODES[piece.dtype], "shape": list(piece.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for data in (len(text).to_bytes(8, "little"), text):
            file.write(data)
            digest.update(data)
        for piece in pieces:
            for chunk in piece.chunks():
                data_view = chunk.view(-1).view(torch.uint8).numpy().data
                file.write(data_view)
                digest.update(data_view)
        assert file.tell() == 8 + len(text) + offset, f"{path}: a tensor gave other rows than it declared"
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_shards(folder: Path, pieces: list[Piece], limit: int) -> dict[str, str]:
    """Write tensors into shards of at most `limit` bytes, with their index if there are several; return names and sha256."""
    groups: list[list[Piece]] = [[]]
    for piece in pieces:
        if groups[-1] and sum(other.size for other in groups[-1]) + piece.size > limit:
            groups.append([])
        groups[-1].append(piece)
    if len(groups) == 1:
        return {"model.safetensors": write_file(folder / "model.safetensors", pieces)}
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    hashes = {name: write_file(folder / name, group) for name, group in zip(names, groups, strict=True)}
    places = {piece.name: name for name, group in zip(names, groups, strict=True) for piece in group}
    index = {"metadata": {"total_size": sum(piece.size for piece in pieces)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return hashes
