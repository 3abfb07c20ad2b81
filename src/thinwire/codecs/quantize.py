"""Few-bit codes with one scale per token, rounded to nearest; gradients stochastically where asked.

The payload is a tensor of integer-valued codes and a tensor of scales; in backward their "gradients" are the codes and scales of the
quantised gradient, so both directions lie on the wire's grid and a transport that does not pack carries the same values. The grids and
their bytes are in `grid.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.bits.codes import pack_codes, packed_size, unpack_codes
from thinwire.bits.grid import FORMAT, WIDTHS, make_grid
from thinwire.bits.raw import Buffer, Direction, TensorSpec, from_raw_bytes, raw_bytes
from thinwire.codecs.base import Codec, CodecOptions, LossyOptions
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.noise import ROUNDING, sample_keys, uniform

CODES, SCALES = 0, 1


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(LossyOptions):
    """Options of the quantised dense boundary."""

    bits: int | None = 8
    """Bits per value: 8, 4, 3, 2 or 1."""


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, grid, backward_grid):
        ctx.dtype, ctx.grid = values.dtype, backward_grid
        return grid.quantize(values)

    @staticmethod
    def backward(ctx, codes, scales):
        return ctx.grid.dequantize(codes, scales, ctx.dtype), None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, codes, scales, grid, backward_grid, dtype, keys_B):
        ctx.grid, ctx.keys_B = backward_grid, keys_B
        return grid.dequantize(codes, scales, dtype)

    @staticmethod
    def backward(ctx, gradient):
        noise = None if ctx.keys_B is None else uniform(ctx.keys_B, gradient.shape).to(gradient.dtype)
        return *ctx.grid.quantize(gradient, noise), None, None, None, None


class QuantizeExit(nn.Module):
    """Turn values into (codes, scales)."""

    def __init__(self, bits: int, backward_bits: int) -> None:
        super().__init__()
        self.grids = make_grid(bits), make_grid(backward_bits)

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        return _Send.apply(stream, *self.grids)


class QuantizeEntry(nn.Module):
    """Turn (codes, scales) back into values; quantise the gradient on its way out."""

    def __init__(self, bits: int, backward_bits: int, stochastic: bool, compute: torch.dtype, layer: int, seed: int) -> None:
        super().__init__()
        self.grids = make_grid(bits), make_grid(backward_bits)
        self.stochastic, self.compute, self.layer, self.seed = stochastic, compute, layer, seed

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        keys_B = sample_keys(context.samples_B, ROUNDING, self.seed, context.step, self.layer) if self.stochastic else None
        return _Receive.apply(*payload, *self.grids, self.compute, keys_B)


class Quantize(Codec):
    """Send the stream in a few bits per value with a bf16 scale per token."""

    Options = QuantizeOptions
    owns_bits = True

    def __init__(self, options: CodecOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        backward = options.bits if options.backward_bits is None else options.backward_bits
        for name, bits in (("bits", options.bits), ("backward_bits", backward)):
            if bits not in WIDTHS:
                raise ValueError(f"codec.{name} is {bits}; it can be {', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}")
        assert options.bits is not None and backward is not None
        self.bits: dict[Direction, int] = {"forward": options.bits, "backward": backward}
        self.lowest: dict[Direction, int] = {"forward": make_grid(options.bits).lowest, "backward": make_grid(backward).lowest}

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        bits, stochastic = (self.bits["forward"], self.bits["backward"]), self.options.rounding == "stochastic"
        entry = None if plan.first else QuantizeEntry(*bits, stochastic, self.compute, plan.layers.start, self.seed)
        exit = None if plan.last else QuantizeExit(*bits)
        return entry, exit

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        count = math.prod(source.shape)
        codes = replace(
            TensorSpec.raw(source.shape, FORMAT),
            forward_bytes=packed_size(count, self.bits["forward"]),
            backward_bytes=packed_size(count, self.bits["backward"]),
        )
        return codes, TensorSpec.raw((*source.shape[:-1], 1), FORMAT)

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        return raw_bytes(tensor) if slot == SCALES else pack_codes(tensor, self.bits[direction], self.lowest[direction])

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        if slot == SCALES:
            return from_raw_bytes(data, spec)
        return unpack_codes(data, self.bits[direction], spec, self.lowest[direction])

    def error_bound(self, source: Tensor) -> Tensor | None:
        return make_grid(self.bits["forward"]).error_bound(source)
