"""Changes of a sample's activations (AQ-SGD, Wang et al., arXiv 2206.01299): the difference to what both ends have stored for it.

    send      Q(X - M[s])                      s: the sample, by its own tokens
    both      M[s] <- M[s] + decoded           once the step is committed
    receive   M[s] + decoded

The more often a sample has come, the smaller the change and the finer its codes. The buffer belongs to the sample, not to its place in
the batch, which would add what is left of one sample to another (systems, section 1). It holds `memory_mb` at each end of a boundary: a
sample has one place in it, which a later one takes over. One that has no place, and all of a validation, is sent as `quantize` does.
Unlike the paper, the first visit has no more bits than the others. Gradients are quantised as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.bits.grid import Gaussian, Uniform, make_grid
from thinwire.codecs.base import CodecOptions
from thinwire.codecs.quantize import Quantize, QuantizeOptions
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.noise import ROUNDING, mix, sample_keys, uniform

STORED = torch.bfloat16
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(QuantizeOptions):
    """Options of the boundary that sends changes."""

    bits: int | None = 4
    """Bits of each change: 8, 4, 3, 2 or 1."""
    backward_bits: int | None = 8
    """Bits of the gradient, which is not stored."""
    memory_mb: float = 32.0
    """What each end of a boundary keeps of samples, and writes into checkpoints: a sample takes 2 T D bytes."""


class Store(nn.Module):
    """What both ends of a boundary have received of samples, each in one place that its tokens choose."""

    values_STD: Tensor
    tags_S: Tensor

    def __init__(self, places: int, context: int, width: int) -> None:
        super().__init__()
        self.register_buffer("values_STD", torch.zeros(places, context, width, dtype=STORED))
        self.register_buffer("tags_S", torch.full((places,), -1))
        self.forget()
        self.register_load_state_dict_post_hook(lambda module, keys: module.forget())

    def forget(self) -> None:
        """Drop the step under way."""
        self.step, self.hits, self.pending = -1, 0.0, list[tuple[Tensor, Tensor, Tensor]]()

    def places(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return where each sample has its place, and how it is told from others there."""
        keys = []
        for salt in (0x9E3779, 0x85EBCB):
            positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device) * salt
            keys.append(mix(mix((ids_BT + positions_T) & _MASK).sum(1) & _MASK))
        return keys[0] % len(self.tags_S), keys[1]

    def expected(self, ids_BT: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what is stored of samples, zeros for those that are not; None: sequences of another length have no place."""
        if ids_BT.shape[1] != self.values_STD.shape[1]:
            return None
        places_B, tags_B = self.places(ids_BT)
        known_B = self.tags_S[places_B] == tags_B
        return self.values_STD[places_B].to(dtype) * known_B[:, None, None]

    def see(self, ids_BT: Tensor, values_BTD: Tensor, context: Context) -> None:
        """Keep a training microbatch until the step is committed."""
        if not context.training or ids_BT.shape[1] != self.values_STD.shape[1]:
            return
        if context.step != self.step:
            self.forget()
            self.step = context.step
        places_B, tags_B = self.places(ids_BT)
        self.pending.append((places_B, tags_B, values_BTD.detach().to(STORED)))

    def commit(self) -> None:
        """Store a step's samples, of which both ends have the same; of two for one place the later one stays."""
        pending = self.pending
        known = [self.tags_S[places_B] == tags_B for places_B, tags_B, _ in pending]
        hits = float(torch.cat(known).float().mean()) if known else 0.0
        for places_B, tags_B, values_BTD in pending:
            for row, place in enumerate(places_B.tolist()):  # one after another: two of one microbatch may have the same
                self.values_STD[place] = values_BTD[row]
                self.tags_S[place] = tags_B[row]
        self.forget()
        self.hits = hits


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, ids_BT, context, end):
        ctx.dtype, ctx.grid = values.dtype, end.grids[1]
        expected = end.statistics.expected(ids_BT, values.dtype)
        codes, scales = end.grids[0].quantize(values if expected is None else values - expected)
        end.statistics.see(ids_BT, end.received(codes, scales, expected, values.dtype), context)
        return codes, scales

    @staticmethod
    def backward(ctx, codes, scales):
        return ctx.grid.dequantize(codes, scales, ctx.dtype), None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, codes, scales, ids_BT, context, end):
        ctx.end, ctx.context = end, context
        values = end.received(codes, scales, end.statistics.expected(ids_BT, end.compute), end.compute)
        end.statistics.see(ids_BT, values, context)
        return values

    @staticmethod
    def backward(ctx, gradient):
        noise = ctx.end.noise(gradient, ctx.context)
        return *ctx.end.grids[1].quantize(gradient, noise), None, None, None


class DeltaEnd(nn.Module):
    """What exit and entry have in common; checkpoints know the store as a statistic (`model/names.py`)."""

    def __init__(self, store: Store, grids: tuple[Uniform | Gaussian, Uniform | Gaussian]) -> None:
        super().__init__()
        self.statistics, self.grids = store, grids

    def received(self, codes: Tensor, scales: Tensor, expected: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return what codes stand for, the same at both ends."""
        change = self.grids[0].dequantize(codes, scales, dtype)
        return change if expected is None else expected + change


class DeltaExit(DeltaEnd):
    """Turn values into codes of their change."""

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        return _Send.apply(stream, ids_BT, context, self)

    def figures(self) -> dict[str, float]:
        """Return the share of the last step's samples that were stored."""
        return {"stored": self.statistics.hits}


class DeltaEntry(DeltaEnd):
    """Add changes to what is stored; quantise the gradient on its way out."""

    def __init__(
        self,
        store: Store,
        grids: tuple[Uniform | Gaussian, Uniform | Gaussian],
        stochastic: bool,
        compute: torch.dtype,
        layer: int,
        seed: int,
    ) -> None:
        super().__init__(store, grids)
        self.stochastic, self.compute, self.layer, self.seed = stochastic, compute, layer, seed

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        return _Receive.apply(*payload, ids_BT, context, self)

    def noise(self, gradient: Tensor, context: Context) -> Tensor | None:
        """Draw the noise of a gradient that is rounded stochastically."""
        if not self.stochastic:
            return None
        keys_B = sample_keys(context.samples_B, ROUNDING, self.seed, context.step, self.layer)
        return uniform(keys_B, gradient.shape).to(gradient.dtype)


class Delta(Quantize):
    """Send changes of samples in few bits per value with a scale per token."""

    Options = DeltaOptions
    options: DeltaOptions

    def __init__(self, options: CodecOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        assert isinstance(options, DeltaOptions)
        size = model.context * model.width * STORED.itemsize
        self.places = int(options.memory_mb * 1e6 // size)
        if self.places < 1:
            raise ValueError(f"codec.memory_mb is {options.memory_mb}; one sample takes {size / 1e6:.3g} MB, choose that or more")

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        grids = make_grid(self.bits["forward"]), make_grid(self.bits["backward"])
        entry = exit = None
        if not plan.first:
            stochastic = self.options.rounding == "stochastic"
            entry = DeltaEntry(self._store(), grids, stochastic, self.compute, plan.layers.start, self.seed)
        if not plan.last:
            exit = DeltaExit(self._store(), grids)
        return entry, exit

    def _store(self) -> Store:
        return Store(self.places, self.model.context, self.model.width)

    def error_bound(self, source: Tensor) -> None:
        """State no bound: it depends on what is stored."""
