"""Residual vector quantisation: groups of channels as numbers of their nearest vectors, what is left over as those of the next codebook.

    X_token = s (x_1, ..., x_{D/g})            s: root mean square of the token, in bf16
    x_i ~ C_1[c_1] + C_2[c_2] + ...            a codebook of 2^b vectors of g channels per level, c_l the nearest to what is left

Activations and gradients have codebooks of their own at each boundary. A codebook is `Shared`: the end that encodes with it finds the
sums and numbers of the vectors nearest to each entry and hands them on as its gradient, the owner moves the entries to the running
means, and both ends then hold the same bits. Between two updates nothing but codes travels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.bits.codes import pack_codes, packed_size, unpack_codes
from thinwire.bits.grid import FORMAT
from thinwire.bits.raw import Buffer, Direction, TensorSpec, from_raw_bytes, raw_bytes
from thinwire.codecs.base import Codec, LossyOptions
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context, Shared
from thinwire.model.initial import draw_normal

CODES, SCALES = 0, 1
FIRST_UPDATES = 8
"""Steps at the start after each of which codebooks are updated."""
FADE, RARE = 0.8, 0.03
"""What stays of the numbers of earlier updates, and the share of the mean below which an entry begins anew beside a common one."""
SHRINK = 0.6
"""Size of each level's first entries beside those of the level before."""


@dataclass(frozen=True, kw_only=True)
class RvqOptions(LossyOptions):
    """Options of residual vector quantisation."""

    group: int = 8
    """Channels of a vector; divides the model width."""
    levels: int = 2
    """Codebooks in a row."""
    code_bits: int = 8
    """Bits of a code, 1 to 8: a codebook has 2^b vectors."""
    codebook_every: int = 20
    """Steps between updates of codebooks, after those of the first 8: each takes 8 levels 2^b (group + 1) bytes each way."""


class Codebook(Shared):
    """Vectors of all levels, L x C x (g + 1): the last number of each is how often it was the nearest, older times fading."""

    def encode(self, vectors_NG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, what they stand for, and what this step finds for `update`, as the gradient of the weight."""
        left_NG, codes, found = vectors_NG, [], torch.zeros_like(self.weight)
        for level, entries in enumerate(self.weight.detach().to(vectors_NG.dtype)):
            entries_CG = entries[:, :-1]
            codes_N = (left_NG @ entries_CG.T - entries_CG.square().sum(1) / 2).argmax(1)
            left_NG = left_NG - entries_CG[codes_N]
            found[level, :, :-1].index_add_(0, codes_N, left_NG.to(found.dtype))
            found[level, :, -1].index_add_(0, codes_N, torch.ones_like(codes_N, dtype=found.dtype))
            codes.append(codes_N)
        return torch.stack(codes, 1), vectors_NG - left_NG, found

    def decode(self, codes_NL: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums of the vectors that codes name."""
        parts = [entries[codes, :-1] for entries, codes in zip(self.weight.detach().to(dtype), codes_NL.unbind(1), strict=True)]
        return torch.stack(parts).sum(0)

    @torch.no_grad()
    def update(self, gradient: Tensor, rate_factor: float) -> None:
        """Move entries to the running means of what was nearest to them; one that is hardly used begins anew beside a common one."""
        if not gradient[..., -1].any():
            return
        for entries, found in zip(self.weight.data, gradient, strict=True):
            counts = FADE * entries[:, -1] + found[:, -1]
            entries[:, :-1] += found[:, :-1] / counts.clamp_min(1e-9).unsqueeze(1)
            entries[:, -1] = counts
            rare = (counts < RARE * counts.mean()).nonzero().flatten()
            common = counts.argsort(descending=True, stable=True)[: len(rare)]
            size = entries[:, :-1].square().mean().sqrt()
            apart = torch.sign(entries[rare, :-1]) * (0.1 * size)
            entries[rare, :-1] = entries[common, :-1] + apart
            entries[rare, -1] = counts[common] / 2


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, own, other, end):
        codes, scales, found = end.quantize(values, end.activations)
        ctx.end, ctx.dtype = end, values.dtype
        ctx.save_for_backward(found)
        return codes, scales

    @staticmethod
    def backward(ctx, codes, scales):
        return ctx.end.dequantize(codes, scales, ctx.end.gradients, ctx.dtype), *ctx.saved_tensors, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, codes, scales, own, other, end, dtype):
        ctx.end = end
        return end.dequantize(codes, scales, end.activations, dtype)

    @staticmethod
    def backward(ctx, gradient):
        codes, scales, found = ctx.end.quantize(gradient, ctx.end.gradients)
        return codes, scales, None, found, None, None


class RvqEnd(nn.Module):
    """What exit and entry have in common: the codebooks of both directions."""

    def __init__(self, activations: Codebook, gradients: Codebook) -> None:
        super().__init__()
        self.activations, self.gradients = activations, gradients

    def quantize(self, values: Tensor, book: Codebook) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scales, and what the codebook's update needs."""
        scales = values.square().mean(-1, keepdim=True).sqrt()
        # The mean of squares overflows or vanishes where the values themselves do not.
        plain = scales.isfinite() & (scales > 0)
        scales = scales.where(plain, values.abs().amax(-1, keepdim=True)).to(FORMAT)
        ratio = (values / scales.to(values.dtype).clamp_min(torch.finfo(FORMAT).tiny)).nan_to_num(0.0, 0.0, 0.0)
        codes, _, found = book.encode(ratio.reshape(-1, book.weight.shape[-1] - 1))
        return codes.view(*values.shape[:-1], -1).to(FORMAT), scales, found

    def dequantize(self, codes: Tensor, scales: Tensor, book: Codebook, dtype: torch.dtype) -> Tensor:
        """Return what codes and scales stand for."""
        vectors = book.decode(codes.long().reshape(-1, len(book.weight)), dtype)
        return vectors.view(*codes.shape[:-1], -1) * scales.to(dtype)


class RvqExit(RvqEnd):
    """Turn values into (codes, scales)."""

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        return _Send.apply(stream, self.activations.weight, self.gradients.weight, self)


class RvqEntry(RvqEnd):
    """Turn (codes, scales) back into values; quantise the gradient on its way out."""

    def __init__(self, activations: Codebook, gradients: Codebook, compute: torch.dtype) -> None:
        super().__init__(activations, gradients)
        self.compute = compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        return _Receive.apply(*payload, self.activations.weight, self.gradients.weight, self, self.compute)


class Rvq(Codec):
    """Send numbers of vectors, and a scale per token."""

    Options = RvqOptions
    options: RvqOptions
    owns_bits = True

    def __init__(self, options: RvqOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        if options.group < 1 or model.width % options.group:
            raise ValueError(f"codec.group is {options.group}; choose a divisor of the model width, {model.width}")
        if not 1 <= options.levels <= 16:
            raise ValueError(f"codec.levels is {options.levels}; choose 1 to 16")
        if not 1 <= options.code_bits <= 8:
            raise ValueError(f"codec.code_bits is {options.code_bits}; choose 1 to 8")
        if options.codebook_every < 1:
            raise ValueError(f"codec.codebook_every is {options.codebook_every}; choose 1 step or more")
        if options.bits is not None:
            raise ValueError(f"codec.bits is {options.bits}, but `rvq` sends codes; leave codec.bits unset, and set codec.code_bits")

    def shares_after(self, step: int) -> bool:
        return step < FIRST_UPDATES or (step + 1) % self.options.codebook_every == 0

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        first, behind = plan.layers.start, plan.layers.stop
        entry = None if plan.first else RvqEntry(self._codebook(first, "activations"), self._codebook(first, "gradients"), self.compute)
        exit = None if plan.last else RvqExit(self._codebook(behind, "activations"), self._codebook(behind, "gradients"))
        return entry, exit

    def _codebook(self, layer: int, kind: str) -> Codebook:
        """Draw a boundary's codebook: at the start of the size of what is left at each level."""
        levels, group = self.options.levels, self.options.group
        drawn = draw_normal(self.seed, f"boundary.{layer}.{kind}", (levels, 2**self.options.code_bits, group + 1))
        sizes_L = torch.tensor([SHRINK**level for level in range(levels)], dtype=drawn.dtype)
        drawn *= sizes_L[:, None, None]
        drawn[..., -1] = 0.0
        return Codebook(drawn.to(self.compute))

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        shape = (*source.shape[:-1], source.shape[-1] // self.options.group * self.options.levels)
        size = packed_size(math.prod(shape), self.options.code_bits)
        codes = replace(TensorSpec.raw(shape, FORMAT), forward_bytes=size, backward_bytes=size)
        return codes, TensorSpec.raw((*source.shape[:-1], 1), FORMAT)

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        return raw_bytes(tensor) if slot == SCALES else pack_codes(tensor, self.options.code_bits)

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        return from_raw_bytes(data, spec) if slot == SCALES else unpack_codes(data, self.options.code_bits, spec)

    def error_bound(self, source: Tensor) -> None:
        """State no bound: codebooks are learnt."""
