"""The subspace boundary (arXiv 2506.01260): layers are constrained so that K coordinates per token say everything.

The network itself is constrained (`stream`), so the boundary is exact: what crosses is the stream, only K wide. To change the rank:
`--codec.rank`. The mathematics is in `model/subspace`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, CodecOptions, check_width
from thinwire.config.sections import ModelConfig
from thinwire.model.architecture import find_architecture
from thinwire.model.cut import StagePlan
from thinwire.model.stream import Stream
from thinwire.model.subspace.basis import random_basis
from thinwire.model.subspace.drift import propose
from thinwire.model.subspace.fixed import FixedFeatures
from thinwire.model.subspace.stream import SubspaceStream


@dataclass(frozen=True, kw_only=True)
class SubspaceOptions(CodecOptions):
    """Options of the subspace boundary."""

    rank: int = 16
    """Coordinates per token, K; at most the model width."""
    fixed_scale: float = 4.0
    """Size of the frozen token features, +-scale."""
    fixed_cache_mb: float = 64.0
    """Keep the table of frozen features, or on a card those of a microbatch, if that is no larger; 0 computes them each time."""
    drift_every: int = 0
    """Steps between moves of the subspace; 0 never moves it."""
    drift_rate: float = 0.1
    """Step length of a move on the Grassmann manifold."""


class Subspace(Codec):
    """Constrain the stream to fixed[t] + Col(U) and send its coordinates."""

    Options = SubspaceOptions
    options: SubspaceOptions

    def __init__(self, options: SubspaceOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        check_width("rank", options.rank, model)
        for name, limit in (("fixed_scale", 1e-30), ("fixed_cache_mb", 0), ("drift_every", 0), ("drift_rate", 1e-30)):
            if not limit <= getattr(options, name) < math.inf:
                raise ValueError(f"codec.{name} is {getattr(options, name)}; choose a number {'above' if limit else 'of at least'} 0")
        for name in leaving_the_subspace(model):
            value = getattr(model, name)
            raise ValueError(f"model.{name} = {value} would leave the subspace; turn it off or choose another codec, such as dense")

    constrains = True

    @property
    def width(self) -> int:
        return self.options.rank

    def stream(self, plan: StagePlan) -> Stream:
        options, model = self.options, self.model
        basis_DK = random_basis(model.width, options.rank, self.seed).to(self.compute)
        cache_bytes = int(options.fixed_cache_mb * 2**20)
        fixed = FixedFeatures(model.vocabulary, model.width, options.fixed_scale, self.seed, cache_bytes, self.compute)
        return SubspaceStream(basis_DK, fixed, measure=plan.last and options.drift_every > 0)

    def moves_after(self, step: int) -> bool:
        return self.options.drift_every > 0 and (step + 1) % self.options.drift_every == 0

    def propose_basis(self, last: Stream) -> Tensor:
        assert isinstance(last, SubspaceStream)
        return propose(last, self.options.drift_rate)


def leaving_the_subspace(model: ModelConfig) -> list[str]:
    """Name the model options in use that put something outside the subspace (method, section 4)."""
    return [*find_architecture(model.architecture).leaving(model), *["tied_head"] * model.tied_head]
