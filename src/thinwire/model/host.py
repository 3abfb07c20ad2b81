"""Modules with buffers that stay on the host: what Python reads in every microbatch would be a wait for the device each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import nn


class HostBuffers(nn.Module):
    """A module whose buffers named here do not go to a device with the rest of it."""

    on_host: tuple[str, ...] = ()

    def _apply(self, function: Callable[..., Any], recurse: bool = True) -> Self:
        kept = {name: self._buffers[name] for name in self.on_host}
        super()._apply(function, recurse)
        self._buffers.update(kept)
        return self
