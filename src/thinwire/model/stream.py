"""How blocks see the residual stream: plainly here, through a subspace in `model/subspace/stream.py`."""

from __future__ import annotations

from torch import Tensor, nn


class Stream(nn.Module):
    """The ordinary stream: D wide, read as it is."""

    version = 0
    """Version of whatever both sides of a boundary must agree on to understand a payload."""

    def static(self, ids_BT: Tensor) -> Tensor | None:
        """Compute what a stage knows of the tokens without any wire, once per microbatch."""
        return None

    def read(self, stream: Tensor, static: Tensor | None) -> Tensor:
        """Return the D-wide hidden state."""
        return stream

    def open(self, stream: Tensor, static: Tensor | None) -> Tensor:
        """Return the D-wide hidden state that the free layers go on with."""
        return self.read(stream, static)

    def adopt(self, basis_DK: Tensor | None) -> None:
        """Take over the basis that stage 0 made; there is none here."""

    def basis(self) -> Tensor | None:
        """Return the basis that all stages share; there is none here."""
        return None

    def go_over(self, basis_DK: Tensor, version: int) -> Tensor:
        """Put a new basis of the next version in place; return R = U'^T U, which carries coordinates over to it."""
        raise AssertionError("this stream has no basis to move")

    def fingerprint(self) -> str:
        """Identify what all stages must share; compared at start-up."""
        return ""
