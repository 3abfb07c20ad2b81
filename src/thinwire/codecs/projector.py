"""Projectors of the anchored boundary, D to K and back: some of the channels, a frozen random matrix, or a learned one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.model.ends import Shared
from thinwire.model.subspace.basis import orthonormalise


class Channels(nn.Module):
    """A_p that cuts the first K channels."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.width, self.rank = width, rank

    def narrow(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD[..., : self.rank]

    def widen(self, coords_BTK: Tensor) -> Tensor:
        return functional.pad(coords_BTK, (0, self.width - self.rank))


class Frozen(nn.Module):
    """A_p as it was drawn; every stage can draw it, so it is not saved."""

    weight: Tensor

    def __init__(self, weight_DK: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight_DK, persistent=False)

    def narrow(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD @ self.weight

    def widen(self, coords_BTK: Tensor) -> Tensor:
        return coords_BTK @ self.weight.T


class Learned(Shared):
    """A_p, learned on the Stiefel manifold: momentum along the manifold, one step size for the whole matrix, retraction by QR."""

    momentum_DK: Tensor
    energy: Tensor
    updates: Tensor

    def __init__(self, weight_DK: Tensor, rate: float) -> None:
        super().__init__(weight_DK)
        self.rate = rate
        self.register_buffer("momentum_DK", torch.zeros_like(weight_DK))
        self.register_buffer("energy", torch.zeros((), dtype=weight_DK.dtype))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def narrow(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD @ self.weight

    def widen(self, coords_BTK: Tensor) -> Tensor:
        return coords_BTK @ self.weight.T

    @torch.no_grad()
    def update(self, gradient: Tensor, rate_factor: float) -> None:
        weight_DK = self.weight.data
        along_DK = tangent(gradient, weight_DK)
        self.updates += 1
        count = int(self.updates)
        self.momentum_DK.copy_(tangent(self.momentum_DK.lerp(along_DK, 0.1), weight_DK))
        self.energy.lerp_(along_DK.square().mean(), 0.05)
        size = (self.energy / (1 - 0.95**count)).sqrt() + 1e-12
        # A step of `rate` changes the matrix, whose entries are about D^-1/2, by that share.
        step = self.rate * rate_factor * len(weight_DK) ** -0.5 / (1 - 0.9**count)
        weight_DK.copy_(orthonormalise((weight_DK - step * self.momentum_DK / size).cpu().double()))


def tangent(direction_DK: Tensor, point_DK: Tensor) -> Tensor:
    """Project a direction onto the tangent space of the Stiefel manifold: G - A sym(A^T G)."""
    inner_KK = point_DK.T @ direction_DK
    return direction_DK - point_DK @ ((inner_KK + inner_KK.T) / 2)
