"""Project an imported model into a subspace: choose U, then Z = U^T W and E = (embedding - fixed) U (method, section 3).

Not exact: what the constrained layers and the embedding write outside U is lost. U spans the top K principal directions of what they
write, each matrix counted as if its input were white and of unit size, the embedding as if all tokens were equally frequent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.checkpoint.safetensors import Stored
from thinwire.hf.foreign import Foreign, row_blocks
from thinwire.hf.plain import bound_axes
from thinwire.model.huggingface import PlainTensor
from thinwire.model.names import EMBEDDING
from thinwire.model.stage import Stage
from thinwire.model.subspace.fixed import FixedFeatures
from thinwire.model.subspace.stream import SubspaceStream


class Projection:
    """The basis that was chosen, and how a stage is filled through it."""

    def __init__(self, foreign: Foreign, stream: SubspaceStream, constrained: int) -> None:
        self.foreign, self.axes = foreign, bound_axes(foreign.model, constrained)
        rank = stream.basis_DK.shape[1]
        values_D, vectors_DD = torch.linalg.eigh(self._energy(stream.fixed))
        self.kept = float(values_D[-rank:].sum() / values_D.sum())
        """Share of the energy written that lies in U."""
        self.basis_DK = vectors_DD[:, -rank:].flip(1).to(stream.basis_DK.dtype)

    def _written(self, entry: PlainTensor) -> Tensor:
        """Return a matrix that writes into the stream in fp64, with what it writes in its columns; a bias is one column."""
        matrix = self.foreign.get(entry).double()
        return matrix.T if self.axes[entry.ours or ""] == 1 else matrix.view(len(matrix), -1)

    def _energy(self, fixed: FixedFeatures) -> Tensor:
        """Sum W W^T over everything that is constrained."""
        width = self.foreign.model.width
        energy_DD = torch.zeros(width, width, dtype=torch.float64)
        for entry in self.foreign.form.tensors(self.foreign.model):
            if entry.ours not in self.axes:
                continue
            if entry.ours == EMBEDDING:
                for rows_ND in self._low(self.foreign.tensors[entry.theirs], fixed):
                    energy_DD.addmm_(rows_ND.T, rows_ND, alpha=1 / entry.shape[0])
            else:
                written_DH = self._written(entry)
                energy_DD.addmm_(written_DH, written_DH.T)
        return energy_DD

    def _low(self, embedding: Stored, fixed: FixedFeatures):
        """Yield blocks of embedding - fixed."""
        for start, stop in row_blocks(embedding):
            yield -fixed.add_to(-embedding.rows(start, stop).double(), torch.arange(start, stop))

    @torch.no_grad()
    def fill(self, stage: Stage) -> None:
        """Copy the weights of a stage into it, those that are constrained as coordinates."""
        assert isinstance(stage.stream, SubspaceStream)
        stage.stream.adopt(self.basis_DK)
        state, basis_DK = stage.state_dict(), self.basis_DK.double()
        for entry in self.foreign.form.tensors(self.foreign.model):
            if entry.ours not in state:
                continue
            if entry.ours not in self.axes:
                state[entry.ours].copy_(self.foreign.get(entry))
            elif entry.ours == EMBEDDING:
                start = 0
                for rows_ND in self._low(self.foreign.tensors[entry.theirs], stage.stream.fixed):
                    state[entry.ours][start : start + len(rows_ND)] = rows_ND @ basis_DK
                    start += len(rows_ND)
            else:
                coordinates_KH = basis_DK.T @ self._written(entry)
                target = state[entry.ours]
                target.copy_(coordinates_KH.T if self.axes[entry.ours] == 1 else coordinates_KH.view(target.shape))
