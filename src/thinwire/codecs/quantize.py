"""Few-bit integers with one scale per token: round to nearest forward, stochastic rounding backward.

The payload is a tensor of integer-valued codes and a tensor of scales; in backward their "gradients" are the codes and scales of the
quantised gradient, so both directions lie on the wire's grid and a transport that does not pack carries the same values.

Layout: codes are stored as code + qmax in `bits` bits, row-major, the first code of a byte in its lowest bits, the last byte padded
with zeros. Scales are bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.codecs.base import Buffer, Codec, CodecOptions, Context, Direction, Options, TensorSpec, from_raw_bytes, raw_bytes
from thinwire.config import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.noise import ROUNDING, sample_keys, uniform

GRID = torch.bfloat16  # holds integers up to 256 exactly
CODES, SCALES = 0, 1


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(Options):
    """Options of the quantised dense boundary."""

    bits: int | None = 8
    """Bits per value: 8, 4 or 2."""


def quantize(values: Tensor, bits: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return integer-valued codes and per-token scales; with noise in [0, 1) round stochastically, else to nearest."""
    qmax = 2 ** (bits - 1) - 1
    # Scaled up before it is rounded to bf16, so that the largest value never needs a code beyond qmax.
    scales = (values.abs().amax(-1, keepdim=True) / qmax * (1 + 2.0**-8)).to(GRID)
    ratio = values / scales.to(values.dtype).clamp_min(torch.finfo(GRID).tiny)
    codes = ratio.round() if noise is None else (ratio + noise).floor()
    # A value that is not finite makes its token's scale not finite, which is what tells the receiver.
    return codes.nan_to_num(0.0, qmax, -qmax).clamp(-qmax, qmax).to(GRID), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply codes by their token's scale."""
    return codes.to(dtype) * scales.to(dtype)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, bits):
        ctx.dtype = values.dtype
        return quantize(values, bits)

    @staticmethod
    def backward(ctx, codes, scales):
        return dequantize(codes, scales, ctx.dtype), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, codes, scales, bits, dtype, keys_B):
        ctx.bits, ctx.keys_B = bits, keys_B
        return dequantize(codes, scales, dtype)

    @staticmethod
    def backward(ctx, gradient):
        noise = uniform(ctx.keys_B, gradient.shape).to(gradient.dtype)
        return *quantize(gradient, ctx.bits, noise), None, None, None


class QuantizeExit(nn.Module):
    """Turn values into (codes, scales)."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        return _Send.apply(stream, self.bits)


class QuantizeEntry(nn.Module):
    """Turn (codes, scales) back into values; quantise the gradient on its way out."""

    def __init__(self, bits: int, compute: torch.dtype, boundary: int, seed: int) -> None:
        super().__init__()
        self.bits, self.compute, self.boundary, self.seed = bits, compute, boundary, seed

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        keys_B = sample_keys(context.samples_B, ROUNDING, self.seed, context.step, self.boundary)
        return _Receive.apply(*payload, self.bits, self.compute, keys_B)


class Quantize(Codec):
    """Send the stream in 8, 4 or 2 bits per value with a bf16 scale per token."""

    Options = QuantizeOptions

    def __init__(self, options: CodecOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        if options.bits not in (8, 4, 2):
            raise ValueError(f"codec.bits is {options.bits}; it can be 8, 4 or 2")
        self.bits: int = options.bits

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        entry = None if plan.first else QuantizeEntry(self.bits, self.compute, plan.layers.start, self.seed)
        exit = None if plan.last else QuantizeExit(self.bits)
        return entry, exit

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        size = math.ceil(math.prod(source.shape) * self.bits / 8)
        codes = replace(TensorSpec.raw(source.shape, GRID), forward_bytes=size, backward_bytes=size)
        return codes, TensorSpec.raw((*source.shape[:-1], 1), GRID)

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        return raw_bytes(tensor) if slot == SCALES else pack_codes(tensor, self.bits)

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        return from_raw_bytes(data, spec) if slot == SCALES else unpack_codes(data, self.bits, spec)

    def error_bound(self, source: Tensor) -> Tensor:
        _, scales = quantize(source, self.bits)
        return scales.to(source.dtype).expand_as(source) * 0.5001 + torch.finfo(GRID).tiny


def pack_codes(codes: Tensor, bits: int) -> bytes:
    """Store integer-valued codes in `bits` bits each."""
    per_byte = 8 // bits
    unsigned = codes.detach().flatten().cpu().add(2 ** (bits - 1) - 1).to(torch.uint8)
    padded = nn.functional.pad(unsigned, (0, -len(unsigned) % per_byte)).view(-1, per_byte)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << (place * bits)
    return packed.numpy().tobytes()


def unpack_codes(data: Buffer, bits: int, spec: TensorSpec) -> Tensor:
    """Take integer-valued codes out of their bytes."""
    if len(data) != spec.forward_bytes:
        raise ValueError(f"payload of {len(data)} bytes where {spec.forward_bytes} were declared for {spec.shape} codes of {bits} bits")
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    places = torch.arange(0, 8, bits, dtype=torch.uint8)
    unsigned = (packed[:, None] >> places) & (2**bits - 1)
    codes = unsigned.flatten()[: math.prod(spec.shape)].to(torch.int16) - (2 ** (bits - 1) - 1)
    return codes.to(spec.dtype).view(spec.shape)
