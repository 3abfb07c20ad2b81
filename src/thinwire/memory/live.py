"""Follow the bytes of all tensors that are made while a block runs, those inside autograd's formulas too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Count the storages that were made in this context and are still alive."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Leave out the storages that were there before: `known` tensors, which operations may return."""
        super().__init__()
        self.bytes = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), named: dict[str, Any] | None = None) -> Any:
        result = operation(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        number, size = storage._cdata, storage.nbytes()
        if number in self._known or size == 0:
            return
        self._known.add(number)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._gone, number, size)

    def _gone(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.bytes -= size
