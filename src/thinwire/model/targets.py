"""What a stage is to predict: the next token everywhere, or where it counts; and the loss of that.

Where some tokens count, the loss of a microbatch of b rows is the sum over its tokens that count, divided by N b / B: N tokens count in the
whole batch of B rows. So the mean over microbatches and replicas, which everything else takes, is the mean over all N tokens, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from thinwire.bits.marks import plain_ids

IGNORED = -100
"""The label of a token that does not count, as torch and transformers have it."""


@dataclass(frozen=True)
class Targets:
    """The tokens to predict."""

    labels_BT: Tensor
    number: Tensor | None = None
    """How many count in the whole batch; None: all of these, and this is all."""
    share: float = 1.0
    """This microbatch's share of the batch's rows."""

    def loss(self, logits_BTV: Tensor) -> Tensor:
        """Return the loss of the logits."""
        flat, labels = logits_BTV.flatten(0, 1), self.labels_BT.flatten()
        if self.number is None:
            return functional.cross_entropy(flat, labels)
        return functional.cross_entropy(flat, labels, ignore_index=IGNORED, reduction="sum") / (self.number.to(flat.dtype) * self.share)


def split_marked(ids: Tensor, rows: int | None) -> tuple[Tensor, Targets]:
    """Return the ids to read, [B, T], and what to predict: of plain ids [B, T + 1], or of marked ones of a batch of `rows` sequences."""
    if rows is None:
        return ids[:, :-1], Targets(ids[:, 1:])
    marked_BT = ids[:, 1:-1]
    return plain_ids(ids[:, :-2]), Targets(marked_BT.masked_fill(marked_BT < 0, IGNORED), ids[0, -1], len(ids) / rows)
