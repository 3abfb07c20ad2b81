"""Head and loss in one operation of torch, in chunks: the logits of a microbatch are never in memory all at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

WIDE = (torch.float32, torch.float64)
"""Formats that weights are trained in."""


def fused_loss(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor | None:
    """Return the mean loss of a head; None where this torch has no such operation, or the head is held in fewer bits."""
    if not hasattr(functional, "linear_cross_entropy") or weight_VD.dtype not in WIDE:
        return None
    hidden_ND, options = hidden_BTD.flatten(0, 1).to(weight_VD.dtype), torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden_ND, weight_VD, targets_BT.flatten(), options=options)
