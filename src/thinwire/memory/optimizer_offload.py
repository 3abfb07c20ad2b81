"""Slow memory for optimizer state: a parameter's state is in memory while it is updated, and lies here from one update to the next.

It is idle during forward and backward, when activations need the room. The copies go through the courier's thread, so a disk that fails
or does not answer is told of in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.memory.offload import Courier
from thinwire.memory.saved_tensors import flat_bytes
from thinwire.memory.tier import ALIGNMENT, aligned


class Shelf:
    """A part of the courier's tier; what lies where is found by name."""

    def __init__(self, courier: Courier, start: int) -> None:
        """Use the tier from a place on."""
        self.courier, self._end = courier, start
        self._places: dict[str, int] = {}
        self._away: dict[str, tuple[torch.Size, tuple[int, ...]]] = {}
        """Shape and strides of what is out."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Carry a tensor's memory out and leave it empty. What is small is not worth the way."""
        size = tensor.untyped_storage().nbytes()
        if name in self._away or size < ALIGNMENT or size != tensor.nbytes:
            return
        if name not in self._places:
            self._places[name] = self._end
            self._end += aligned(size)
        tier, place = self.courier.tier, self._places[name]
        assert tier is not None and self._end <= tier.size, "more optimizer state than was measured"
        mark, piece = tier.mark(), flat_bytes(tensor)
        self.courier.errand(lambda: tier.write(place, [piece], mark), f"room for {name}")
        self._away[name] = tensor.shape, tensor.stride()
        tensor.data = tensor.new_empty(0)

    def get(self, name: str, tensor: Tensor) -> None:
        """Give a tensor its memory again, if it is out."""
        if name not in self._away:
            return
        tier, place = self.courier.tier, self._places[name]
        assert tier is not None
        whole = tensor.new_empty_strided(*self._away[name])
        self.courier.errand(lambda: tier.read(place, [flat_bytes(whole)]), name)
        tensor.data = whole
        del self._away[name]


def worth_moving(states: Iterable[Iterable[int]]) -> list[int]:
    """Return the sizes, of those of all parameters' state, that are worth the way."""
    return [size for sizes in states for size in sizes if size >= ALIGNMENT]


def shelf_bytes(sizes: Iterable[int]) -> int:
    """Return the room that tensors of these sizes take in a tier."""
    return sum(map(aligned, sizes))
