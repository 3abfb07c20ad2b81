"""Move the subspace: one Riemannian step on the Grassmann manifold towards the gradient energy that it misses (method, section 3).

Off by default: it changes no expressivity and changed nothing in small runs. All stages go over between the same two steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.model.subspace.basis import orthonormalise
from thinwire.model.subspace.stream import SubspaceStream


def grassmann_step(basis_DK: Tensor, energy_DD: Tensor, rate: float) -> Tensor:
    """Return qr(U - rate xi) with xi = (I - U U^T)(-2 Gamma U), Gamma normalised by its largest eigenvalue; on the host, in fp64."""
    basis, energy = basis_DK.cpu().double(), energy_DD.cpu().double()  # on the host, for not every device has fp64
    if not energy.isfinite().all():  # from a checkpoint that was written while gradients were no numbers
        return basis
    largest = torch.linalg.eigvalsh(energy)[-1]
    if largest <= 0:
        return basis
    pull = -2 * (energy / largest) @ basis
    tangent = pull - basis @ (basis.T @ pull)
    return orthonormalise(basis - rate * tangent)


def propose(stream: SubspaceStream, rate: float) -> Tensor:
    """Compute the next basis from the energy seen since the last move, and forget that energy."""
    basis_DK = grassmann_step(stream.basis_DK, stream.energy_DD, rate).to(stream.basis_DK.dtype).to(stream.basis_DK.device)
    stream.energy_DD.zero_()
    return basis_DK


@torch.no_grad()
def carry_over(tensor: Tensor, rotation_KK: Tensor, axis: int) -> None:
    """Multiply coordinates that lie along `axis` by R, in place: Z <- R Z (axis 0) or E <- E R^T (axis 1)."""
    rotation = rotation_KK.to(tensor.dtype).to(tensor.device)
    tensor.copy_(rotation @ tensor if axis == 0 else tensor @ rotation.T)
