"""How blocks see the residual stream: plainly here, through a subspace in `subspace/layers.py`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Move:
    """A new basis, its version, and R = U'^T U, which carries coordinates over. All stages apply it between the same two steps."""

    basis_DK: Tensor
    version: int
    rotation_KK: Tensor


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

    def adopt(self, other: Stream) -> None:
        """Take over what all stages must share from the stage that made it."""

    def go_over(self, move: Move) -> None:
        """Go over to a new basis."""
        raise AssertionError("this stream has no basis to move")

    def fingerprint(self) -> str:
        """Identify what all stages must share; compared at start-up."""
        return ""
