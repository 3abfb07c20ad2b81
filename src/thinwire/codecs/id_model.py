"""How often each token id has come: both ends of a boundary count the ids of every step that is committed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.bits.ids import LEARNING, id_table
from thinwire.model.ends import Context
from thinwire.model.host import HostBuffers


class IdModel(HostBuffers):
    """Count ids, and make the coder's table of the counts."""

    on_host = ("counts_V",)
    counts_V: Tensor

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("counts_V", torch.ones(vocabulary, dtype=torch.int64))
        self.forget()
        self.register_load_state_dict_post_hook(lambda module, keys: module.forget())

    def forget(self) -> None:
        """Drop what was made from the state, and the step under way."""
        self._table: Any = None
        self.step = -1
        self.seen: list[Tensor] = []

    def table(self) -> Any:
        """Return the coder's table."""
        if self._table is None:
            self._table = id_table(self.counts_V.numpy())
        return self._table

    def see(self, ids: Tensor, context: Context) -> None:
        """Keep a training microbatch's ids until the step is committed."""
        if not context.training:
            return
        if context.step != self.step:
            self.step, self.seen = context.step, []
        self.seen.append(ids.flatten())

    def commit(self) -> None:
        """Count the ids of a step, of which both ends have the same."""
        if self.seen:
            self.counts_V += torch.bincount(torch.cat(self.seen).cpu(), minlength=len(self.counts_V)) * LEARNING
        self.forget()
