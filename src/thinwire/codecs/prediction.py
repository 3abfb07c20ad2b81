"""What both ends of a boundary expect of a token before it has come: its mean of late, or that of all tokens where it is new.

The network changes with every step, so a token's mean is of its last few values: of 64, codes took 1.46 bits where they take 1.03 of 3
(docs/log.md, which also says what means by pairs of tokens are worth). Integers throughout, in a unit that is the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.codecs.mean_table import MeanTable

TOKEN_WINDOW, GENERAL_WINDOW = 3, 4096
"""How many values the mean of a token, and of all, is of."""
LARGEST_TABLE = 2**25
"""Most elements of the table of tokens; a larger one is left out."""


class Prediction(nn.Module):
    """Means of tokens."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.general = MeanTable(1, width, GENERAL_WINDOW)
        self.tokens = MeanTable(vocabulary if vocabulary * width <= LARGEST_TABLE else 0, width, TOKEN_WINDOW)

    def expected(self, ids: Tensor) -> Tensor:
        """Return what is expected of tokens."""
        found = self.general.on(ids.device)[0][0].long().expand(*ids.shape, -1)
        if not len(self.tokens):
            return found
        means_RK, counts_R = self.tokens.on(ids.device)
        return torch.where((counts_R[ids] > 0).unsqueeze(-1), means_RK[ids].long(), found)

    def learn(self, ids_N: Tensor, values_NK: Tensor) -> None:
        """Take in what has come for tokens."""
        if len(self.tokens):
            self.tokens.learn(ids_N, values_NK, self.general.means_RK[0].long())
        self.general.learn(torch.zeros_like(ids_N), values_NK)

    def tables(self) -> tuple[MeanTable, ...]:
        """Return all means."""
        return self.general, self.tokens
