"""Means of what has come, by row: what both ends of a boundary expect of a token, or of any."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LIMIT = 2**30
"""Largest mean, in the unit in which whoever calls counts."""
CARRY = 2**14
"""One, in the elements of a rotation: products with it add up exactly in fp64."""


class MeanTable(nn.Module):
    """Integer means of the last `window` values of each row, and how many these are."""

    means_RK: Tensor
    counts_R: Tensor

    def __init__(self, rows: int, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("means_RK", torch.zeros(rows, width, dtype=torch.int32))
        self.register_buffer("counts_R", torch.zeros(rows, dtype=torch.int32))

    def __len__(self) -> int:
        return len(self.means_RK)

    def learn(self, rows_N: Tensor, values_NK: Tensor, start_K: Tensor | None = None) -> None:
        """Take in values of these rows; a row that is new begins with one value that is `start_K`, where that is given."""
        device = self.means_RK.device
        rows, places, added = rows_N.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(rows), values_NK.shape[1], dtype=torch.int64).index_add_(0, places, values_NK)
        known, means = self.counts_R[rows.to(device)].cpu().long().unsqueeze(1), self.means_RK[rows.to(device)].cpu().long()
        base = means if start_K is None else torch.where(known > 0, means, start_K)
        weight = known if start_K is None else known.clamp_min(1)
        total = weight + added.unsqueeze(1)
        moved = torch.div(base * weight + sums, total, rounding_mode="floor").clamp_(-LIMIT, LIMIT)
        self.means_RK[rows.to(device)] = moved.int().to(device)
        self.counts_R[rows.to(device)] = total.squeeze(1).clamp_max(self.window).int().to(device)

    def turn(self, axes_KK: Tensor) -> None:
        """Go over to other axes, the columns of an orthonormal matrix."""
        if len(self):
            turned = (self.means_RK.cpu().double() @ (axes_KK * CARRY).round() / CARRY).round()
            self.means_RK.copy_(turned.clamp_(-LIMIT, LIMIT).int())
