"""The frozen token features `fixed[t]`: +-scale, the signs from an integer hash of (seed, token, channel).

Every stage computes them for itself, so the part of the embedding outside the subspace needs no wire, and no V x D table either. Where
memory allows, the table is kept as a cache; it holds the same values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.model.noise import FIXED, key, mix

CHUNK = 64
"""Tokens whose features exist at once on a CPU when there is no table."""
CHUNK_BYTES = 2**28
"""The memory that computing features may take at once on a card, which pays for every launch and has no cache to stay in."""
_MASK = 0xFFFFFFFF


class FixedFeatures(nn.Module):
    """Map ids to their frozen D-wide features."""

    signs: Tensor
    table_VD: Tensor | None

    def __init__(self, vocabulary: int, width: int, scale: float, seed: int, cache_bytes: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.vocabulary, self.width, self.scale, self.cache_bytes = vocabulary, width, scale, cache_bytes
        self.salt = key(FIXED, seed)
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
        self.register_buffer("signs", (1 - 2 * bits).to(dtype) * scale, persistent=False)
        table = None
        if vocabulary * width * dtype.itemsize <= cache_bytes:
            table = self.compute(torch.arange(vocabulary))
        self.register_buffer("table_VD", table, persistent=False)

    def compute(self, ids: Tensor) -> Tensor:
        """Compute the features from the hash: 32 channels per hashed word, the first channel in its lowest bit."""
        words = -(-self.width // 32)
        rows = mix((ids.long() + self.salt) & _MASK)
        blocks = mix(torch.arange(1, words + 1, device=ids.device))
        bits = mix((rows.unsqueeze(-1) + blocks) & _MASK)
        octets = torch.stack([(bits >> place) & 255 for place in (0, 8, 16, 24)], dim=-1)
        return functional.embedding(octets, self.signs).flatten(-3)[..., : self.width]

    def forward(self, ids: Tensor) -> Tensor:
        return self.compute(ids) if self.table_VD is None else functional.embedding(ids, self.table_VD)

    def keeps(self, ids: Tensor) -> bool:
        """Tell whether the features of these tokens are computed once for a microbatch: from the table, or on a card if they fit."""
        if self.table_VD is not None or ids.device.type == "cpu":
            return self.table_VD is not None
        return ids.numel() * self.width * self.signs.dtype.itemsize <= self.cache_bytes

    def add_to(self, hidden_ND: Tensor, ids_N: Tensor) -> Tensor:
        """Add the features in place, a few tokens at a time, so that they never take memory as a whole."""
        # A hashed word of 32 channels is an int64, and so is each of its four octets; then there are the features themselves.
        token_bytes = self.width * (self.signs.dtype.itemsize + 2)
        chunk = CHUNK if ids_N.device.type == "cpu" else max(CHUNK, CHUNK_BYTES // token_bytes)
        for start in range(0, len(ids_N), chunk):
            hidden_ND[start : start + chunk] += self(ids_N[start : start + chunk])
        return hidden_ND
