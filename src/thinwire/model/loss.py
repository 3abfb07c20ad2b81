"""Head and loss in one operation of torch, in chunks: the logits of a microbatch are never in memory all at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.model.targets import IGNORED, Targets

WIDE = (torch.float32, torch.float64)
"""Formats that weights are trained in."""


def fused_loss(hidden_BTD: Tensor, weight_VD: Tensor, targets: Targets) -> Tensor | None:
    """Return the loss of a head as `Targets.loss` counts it; None where torch has no such operation, or the head is held in fewer bits."""
    if not hasattr(functional, "linear_cross_entropy") or weight_VD.dtype not in WIDE:
        return None
    hidden_ND, options = hidden_BTD.flatten(0, 1).to(weight_VD.dtype), torch.nn.LinearCrossEntropyOptions()
    fused, labels_N = partial(functional.linear_cross_entropy, hidden_ND, weight_VD, options=options), targets.labels_BT.flatten()
    if targets.number is None:
        return fused(labels_N)
    return fused(labels_N, ignore_index=IGNORED, reduction="sum") / (targets.number.to(hidden_ND.dtype) * targets.share)
