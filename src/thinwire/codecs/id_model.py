"""How often each token id has come: both ends of a boundary count the ids of every step that is committed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bits.ids import LEARNING, id_table
from thinwire.model.ends import Context


class IdModel(nn.Module):
    """Count ids, and make the coder's table of the counts."""

    counts_V: Tensor

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("counts_V", torch.ones(vocabulary, dtype=torch.int64))
        self.forget()
        self.register_load_state_dict_post_hook(lambda module, keys: module.forget())

    def forget(self) -> None:
        """Drop what was made from the state, and the step under way."""
        self._table: Any = None
        self.step, self.seen = -1, torch.zeros(0, dtype=torch.int64)

    def table(self) -> Any:
        """Return the coder's table."""
        if self._table is None:
            self._table = id_table(self.counts_V.cpu().numpy())
        return self._table

    def see(self, ids: Tensor, context: Context) -> None:
        """Keep a training microbatch's ids until the step is committed."""
        if not context.training:
            return
        before = self.seen if context.step == self.step else self.seen[:0]
        self.step, self.seen = context.step, torch.cat((before, ids.flatten().cpu()))

    def commit(self) -> None:
        """Count the ids of a step, of which both ends have the same."""
        found = torch.bincount(self.seen, minlength=len(self.counts_V)) * LEARNING
        self.counts_V += found.to(self.counts_V.device)
        self.forget()
