"""Several documents in one sequence: where each begins follows from the token that ends one, so nothing about it has to travel.

The token belongs to the document that it ends. Behind it attention sees nothing of what was before, and positions begin at 0 again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def beginnings(ids_BT: Tensor, separator: int) -> Tensor:
    """Return for each token the place at which its document begins."""
    begins_BT = functional.pad(ids_BT[:, :-1] == separator, (1, 0))
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    return torch.where(begins_BT, places_T, 0).cummax(dim=1).values


def places_in_documents(ids_BT: Tensor, separator: int) -> Tensor:
    """Return the position of each token in its document."""
    return torch.arange(ids_BT.shape[1], device=ids_BT.device) - beginnings(ids_BT, separator)


class Documents:
    """What the blocks of a stage know of the documents in some sequences."""

    def __init__(self, ids_BT: Tensor, separator: int, before_BT: Tensor | None = None) -> None:
        """Look at tokens, behind some that were read before."""
        time = ids_BT.shape[1]
        all_BT = ids_BT if before_BT is None else torch.cat((before_BT.to(ids_BT.device).expand(len(ids_BT), -1), ids_BT), dim=1)
        begin_BT = beginnings(all_BT, separator)
        self.places_BT = places_in_documents(all_BT, separator)[:, -time:]
        """The position of each token in its document."""
        self.same_B1TT = (begin_BT[:, -time:, None] == begin_BT[:, None, :]).unsqueeze(1)
        """Whether two tokens, a new one and any one, are of the same document."""

    def rows(self, table_TS: Tensor) -> Tensor:
        """Return the rows of a table of positions that belong to the tokens, the same for all heads."""
        return table_TS[self.places_BT].unsqueeze(1)
