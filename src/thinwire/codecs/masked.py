"""The receiving end of codecs that send some values and a mask of where they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.bits.mask import fill
from thinwire.codecs.base import absorb
from thinwire.model.ends import Context


class MaskEntry(nn.Module):
    """Put the values received where the mask received says."""

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        values, mask = payload
        return absorb(fill(mask.bool(), values.to(self.compute)), mask)
