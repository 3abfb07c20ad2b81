"""RMSNorm, with gains and without."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.config.sections import ModelConfig


class RMSNorm(nn.Module):
    """Divide by the root mean square, multiply by gains."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self.eps)


class PlainNorm(nn.Module):
    """Divide by the root mean square over `width` channels, of which the input holds all or the K coordinates that say them."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, hidden: Tensor) -> Tensor:
        # |U c| = |c|, so dividing by the model's width makes norm(U c) = U norm(c): what is written stays in the subspace.
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) / self.width + self.eps)
        return (wide * scale).to(hidden.dtype)


def norm_in_front(model: ModelConfig) -> nn.Module:
    """Make the norm that a branch reads through."""
    return nn.Identity() if model.norm_reorder else RMSNorm(model.width, model.norm_eps)


def norm_behind(model: ModelConfig, width: int) -> nn.Module:
    """Make the norm of what a branch writes into `width` channels."""
    if model.norm_reorder:
        return PlainNorm(model.width, model.norm_eps)
    return RMSNorm(width, model.norm_eps) if model.branch_norm_gains else nn.Identity()


def norm_of_heads(model: ModelConfig) -> nn.Module:
    """Make the norm of each head's queries, or keys."""
    if model.qk_norm == "none":
        return nn.Identity()
    return (RMSNorm if model.qk_norm == "gains" else PlainNorm)(model.head_size, model.norm_eps)
