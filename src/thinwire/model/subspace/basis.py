"""The basis U (D x K, orthonormal columns) of the subspace that every constrained layer writes into."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from thinwire.model.noise import key


def random_basis(width: int, rank: int, seed: int) -> Tensor:
    """Return a random orthonormal basis in fp64. QR differs in its last bits between CPUs: make it once and send it."""
    generator = torch.Generator().manual_seed(key(seed, width, rank))
    return orthonormalise(torch.randn(width, rank, dtype=torch.float64, generator=generator))


def orthonormalise(matrix_DK: Tensor) -> Tensor:
    """Return the Q of a QR decomposition, signs fixed so that each column stays close to the one it came from."""
    basis_DK, triangle_KK = torch.linalg.qr(matrix_DK)
    return basis_DK * triangle_KK.diagonal().sign().where(triangle_KK.diagonal() != 0, torch.ones(()).to(matrix_DK))


def distance_outside(hidden: Tensor, basis_DK: Tensor) -> float:
    """Return the relative distance of row vectors from the subspace: |x - x U U^T| / |x|."""
    hidden = hidden.detach()
    outside = hidden - hidden @ basis_DK @ basis_DK.T
    return float(outside.norm() / hidden.norm())


def bits_sha256(basis_DK: Tensor) -> str:
    """Return the sha256 of the basis's bits."""
    return hashlib.sha256(basis_DK.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
