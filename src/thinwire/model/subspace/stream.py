"""The residual stream carried as K subspace coordinates c instead of D channels: x = fixed[t] + U c (method, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.model.host import HostBuffers
from thinwire.model.stream import Stream
from thinwire.model.subspace.basis import bits_sha256
from thinwire.model.subspace.fixed import FixedFeatures


class SubspaceStream(HostBuffers, Stream):
    """Read x = fixed[t] + U c; hold the basis and, for the drift, the gradient energy seen where the free layers begin."""

    on_host = ("basis_version",)
    basis_DK: Tensor
    basis_version: Tensor
    energy_DD: Tensor

    def __init__(self, basis_DK: Tensor, fixed: FixedFeatures, measure: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.measure = measure
        self.register_buffer("basis_DK", basis_DK.clone())
        self.register_buffer("basis_version", torch.zeros((), dtype=torch.int64))
        self.register_buffer("energy_DD", torch.zeros(len(basis_DK), len(basis_DK)) if measure else None)

    @property
    def version(self) -> int:  # type: ignore[override]
        return int(self.basis_version)

    def static(self, ids_BT: Tensor) -> Tensor:
        """Return fixed[t] where it is kept, else the ids: on a CPU hashing again at each read costs little and holds no memory."""
        return self.fixed(ids_BT) if self.fixed.keeps(ids_BT) else ids_BT

    def read(self, stream: Tensor, static: Tensor | None) -> Tensor:
        assert static is not None
        coordinates_NK = stream.flatten(0, 1).to(self.basis_DK.dtype)
        # Never in bf16: `fixed` is so much larger at first that a sum of 8 bits keeps little of U c (bench/precision.py).
        with torch.autocast(stream.device.type, enabled=False):
            if static.is_floating_point():
                hidden_ND = torch.addmm(static.flatten(0, 1), coordinates_NK, self.basis_DK.T)
            else:
                hidden_ND = self.fixed.add_to(torch.mm(coordinates_NK, self.basis_DK.T), static.flatten())
        return hidden_ND.view(*stream.shape[:-1], -1)

    def open(self, stream: Tensor, static: Tensor | None) -> Tensor:
        hidden_BTD = self.read(stream, static)
        if self.measure and hidden_BTD.requires_grad:
            hidden_BTD.register_hook(self._accumulate)
        return hidden_BTD

    def _accumulate(self, gradient_BTD: Tensor) -> None:
        """Add g^T g of the activation gradient before projection; one that would make it no number is left out, as its step is."""
        flat = gradient_BTD.flatten(0, 1).to(self.energy_DD.dtype)
        # No entry of a sum of g^T g is larger than its trace.
        trace = torch.linalg.vector_norm(flat).square() + self.energy_DD.trace()
        flat = flat.where(trace < torch.finfo(flat.dtype).max, 0.0)
        self.energy_DD.addmm_(flat.T, flat)

    def adopt(self, basis_DK: Tensor | None) -> None:
        assert basis_DK is not None
        self.basis_DK.copy_(basis_DK)

    def basis(self) -> Tensor:
        return self.basis_DK

    def go_over(self, basis_DK: Tensor, version: int) -> Tensor:
        if version != self.version + 1:
            raise ValueError(f"basis version {version} cannot follow version {self.version}; restart from the last checkpoint")
        before_DK = self.basis_DK.clone()
        # Into the memory that all stages have alike: the last bits of the product depend on its layout, and one that came over a link or
        # from a factorisation has another.
        self.basis_DK.copy_(basis_DK)
        # On the host, for not every device has fp64.
        rotation_KK = self.basis_DK.cpu().double().T @ before_DK.cpu().double()
        self.basis_version.fill_(version)
        return rotation_KK

    def fingerprint(self) -> str:
        probe = self.fixed.compute(torch.tensor([0, self.fixed.vocabulary - 1], device=self.basis_DK.device))
        return bits_sha256(self.basis_DK) + bits_sha256(probe)
