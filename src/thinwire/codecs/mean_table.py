"""Means of what has come, by row: what both ends of a boundary expect of a token, or of any."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.model.host import HostBuffers
from thinwire.util.device import to_device

LIMIT = 2**30
"""Largest mean, in the unit in which whoever calls counts."""
CARRY = 2**14
"""One, in the elements of a rotation: products with it add up exactly in fp64."""


class MeanTable(HostBuffers):
    """Integer means of the last `window` values of each row, and how many these are."""

    on_host = ("means_RK", "counts_R")
    means_RK: Tensor
    counts_R: Tensor

    def __init__(self, rows: int, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self._there: tuple[tuple[int, ...], Tensor, Tensor] | None = None
        self.register_buffer("means_RK", torch.zeros(rows, width, dtype=torch.int32))
        self.register_buffer("counts_R", torch.zeros(rows, dtype=torch.int32))

    def __len__(self) -> int:
        return len(self.means_RK)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return means and counts on a device, where they are copied once after they have changed."""
        now = (self.means_RK._version, self.counts_R._version)
        if device.type == "cpu":
            return self.means_RK, self.counts_R
        if self._there is None or self._there[0] != now:
            self._there = (now, to_device(self.means_RK, device), to_device(self.counts_R, device))
        return self._there[1:]

    def learn(self, rows_N: Tensor, values_NK: Tensor, start_K: Tensor | None = None) -> None:
        """Take in values of these rows; a row that is new begins with one value that is `start_K`, where that is given."""
        rows, places, added = rows_N.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(rows), values_NK.shape[1], dtype=torch.int64).index_add_(0, places, values_NK)
        known, means = self.counts_R[rows].long().unsqueeze(1), self.means_RK[rows].long()
        base = means if start_K is None else torch.where(known > 0, means, start_K)
        weight = known if start_K is None else known.clamp_min(1)
        total = weight + added.unsqueeze(1)
        moved = torch.div(base * weight + sums, total, rounding_mode="floor").clamp_(-LIMIT, LIMIT)
        self.means_RK[rows] = moved.int()
        self.counts_R[rows] = total.squeeze(1).clamp_max(self.window).int()

    def turn(self, axes_KK: Tensor) -> None:
        """Go over to other axes, the columns of an orthonormal matrix."""
        if len(self):
            turned = (self.means_RK.double() @ (axes_KK * CARRY).round() / CARRY).round()
            self.means_RK.copy_(turned.clamp_(-LIMIT, LIMIT).int())
