"""Train on a source while it streams by: memory holds a few blocks of windows, from each of which samples are drawn in a seeded order.

The sample of an index is a function of seed, index and source: block i // N, and in it a place by permutation. To go on in the middle, the
places at which blocks begin are kept in the cache: which document, and how many of its tokens belong to the block before. Without them the
source is read from its beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from thinwire.data.batches import Samples, permute
from thinwire.data.cache import read_json
from thinwire.data.source import Split
from thinwire.data.tokenize import Numbered, encode_numbered
from thinwire.util.files import atomic_file

KEPT = 2
"""Blocks in memory: a batch may begin in one and end in the next."""
Place = tuple[int, int]
"""Number of a document, and how many of its tokens lie before."""


class Source(Protocol):
    """Documents in a fixed order."""

    def numbered(self, split: Split, first: int) -> Iterator[Numbered]:
        """Yield text from number `first` on, with its number and whether it ends a document."""
        ...


class Beginnings:
    """Where blocks begin, as far as is known, and how many windows there are in all once the end was seen."""

    def __init__(self, path: Path) -> None:
        self.path, entry = path, read_json(path)
        known = entry.get("places")
        self.begins: list[Place] = [(0, 0)]
        self.windows: int | None = None
        if isinstance(known, list) and known and entry.get("sha256") == self._hash(known, entry.get("windows")):
            self.begins = [(int(number), int(skip)) for number, skip in known]
            self.windows = None if entry["windows"] is None else int(str(entry["windows"]))

    def add(self, block: int, place: Place) -> None:
        """Note where a block begins."""
        if block == len(self.begins):
            self.begins.append(place)
            self._write()

    def end(self, windows: int) -> None:
        """Note how many windows there are."""
        if self.windows != windows:
            self.windows = windows
            self._write()

    def _write(self) -> None:
        places = [list(place) for place in self.begins]
        with atomic_file(self.path) as file:
            file.write(json.dumps({"sha256": self._hash(places, self.windows), "places": places, "windows": self.windows}).encode())

    @staticmethod
    def _hash(places: object, windows: object) -> str:
        return hashlib.sha256(json.dumps([places, windows]).encode()).hexdigest()


class Streamed(Samples):
    """Hand out windows of T+1 tokens at stride T, those of N windows that follow each other in a seeded order."""

    def __init__(self, source: Source, tokenizer: Tokenizer, context: int, buffer: int, seed: int, limit: int, places: Beginnings) -> None:
        self.source, self.tokenizer, self.context, self.buffer, self.seed = source, tokenizer, context, buffer, seed
        self.limit, self.places = limit, places
        self.blocks: OrderedDict[int, np.ndarray] = OrderedDict()
        self.reader: Iterator[np.ndarray] = iter(())
        self.next = -1
        """The block that the reader yields next."""

    def sample(self, index: int) -> np.ndarray:
        while True:
            epoch, position = (0, index) if self.places.windows is None else divmod(index, self.places.windows)
            block, place = divmod(position, self.buffer)
            tokens_N = self.block(block)
            if tokens_N is not None:
                break
        count = (len(tokens_N) - 1) // self.context
        start = permute(place, count, f"{self.seed}/{epoch}/{block}") * self.context
        return tokens_N[start : start + self.context + 1].astype(np.int64)

    def block(self, number: int) -> np.ndarray | None:
        """Return the tokens of a block; None: the source ends before it, which is known from now on."""
        if number not in self.blocks:
            known = min(number, len(self.places.begins) - 1)
            if not known <= self.next <= number:
                self.reader, self.next = self._read(known), known
            while self.next <= number:
                tokens_N = next(self.reader, None)
                if tokens_N is None:
                    assert self.places.windows is not None
                    return None
                self.blocks[self.next] = tokens_N
                self.next += 1
                while len(self.blocks) > KEPT:
                    self.blocks.popitem(last=False)
        self.blocks.move_to_end(number)
        return self.blocks[number]

    def _read(self, block: int) -> Iterator[np.ndarray]:
        """Yield the tokens of the blocks from one on whose beginning is known; the last token of each is the first of the next."""
        size = self.buffer * self.context
        first, skip = self.places.begins[block]
        held: list[tuple[int, np.ndarray]] = []
        have, left = -skip, self.limit - (block * size - skip)
        for number, ids_N in encode_numbered(self.tokenizer, self.source.numbered("train", first), left):
            held.append((number, ids_N))
            have += len(ids_N)
            while have > size:
                yield np.concatenate([ids for _, ids in held])[skip : skip + size + 1]
                block, skip, have = block + 1, skip + size, have - size
                while skip >= len(held[0][1]):
                    skip -= len(held.pop(0)[1])
                self.places.add(block, (held[0][0], skip))
        windows = max(0, have - 1) // self.context
        self.places.end(block * self.buffer + windows)
        if windows:
            yield np.concatenate([ids for _, ids in held])[skip : skip + windows * self.context + 1]
