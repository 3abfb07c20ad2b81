"""What one block of one microbatch keeps for its backward: the storages of the tensors that autograd saves, each once.

Autograd hands every tensor it saves to `pack` and asks for it again with `unpack`. Between the two the bytes may have been anywhere:
what comes back has the same bits in memory of torch's own, at the same place of its storage.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

State = Literal["here", "away", "back"]


def address(tensor: Tensor) -> int:
    """Return where a tensor's storage lies: equal for all views of it."""
    return tensor.untyped_storage().data_ptr()


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage as bytes, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One saved tensor: which storage of its block it views, and how."""

    owner: SavedTensors
    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """The saved tensors of one block; `block` is its number in the stage, -1 for what the stage's ends keep."""

    def __init__(self, block: int, exempt: AbstractSet[int], count: Callable[[int], None]) -> None:
        """Collect what does not lie at an exempt address, and tell `count` of every byte that comes to it."""
        self.block = block
        self.state: State = "here"
        self.device = torch.device("cpu")
        self.mark: Any = None
        """The point in the computation from which on the storages can be copied."""
        self.storages: list[Tensor] = []
        self.sizes: list[int] = []
        self.counted = 0
        """Bytes that stand in the counter for it."""
        self.place: int | None = None
        """Where its bytes lie in slow memory."""
        self._exempt, self._count = exempt, count
        self._known: dict[int, int] = {}

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def addresses(self) -> AbstractSet[int]:
        """Return where the storages lie, until `close`."""
        return self._known.keys()

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which autograd hands over what it saves."""
        return saved_tensors_hooks(self.pack, unpack)

    def pack(self, tensor: Tensor) -> SavedTensor | Tensor:
        """Take a tensor that autograd saves; parameters and what the wire holds are not ours to keep."""
        here = address(tensor)
        if here in self._exempt or tensor.untyped_storage().nbytes() == 0:
            return tensor.detach()  # never the tensor itself: it would hold the graph that holds it
        if here not in self._known:
            self._known[here] = len(self.storages)
            storage = flat_bytes(tensor.detach())
            self.storages.append(storage)
            self.device = storage.device
            self.sizes.append(len(storage))
            self.count(len(storage))
        return SavedTensor(self, self._known[here], tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def count(self, size: int) -> None:
        """Enter bytes that are in memory for this block, or take them off."""
        self.counted += size
        self._count(size)

    def close(self) -> None:
        """End collecting: from now on an address may come to belong to something else."""
        self._known.clear()

    def free(self) -> None:
        """Drop the storages."""
        self.storages = []
        self.count(-self.counted)


def unpack(saved: SavedTensor | Tensor) -> Tensor:
    """Return a saved tensor to autograd."""
    if isinstance(saved, Tensor):
        return saved
    assert saved.owner.storages, "the block's activations are not in memory"
    storage = saved.owner.storages[saved.storage]
    form = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return form.set_(storage.untyped_storage(), saved.offset, saved.shape, saved.stride)
