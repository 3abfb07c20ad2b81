"""Few-bit grids for real numbers: evenly spaced codes under the largest value of a token, or the best levels for a Gaussian.

A grid turns values into integer-valued codes and one scale per token, both exact in bf16, and back. `codes.py` puts codes into bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMAT = torch.bfloat16  # holds integers up to 256 exactly
WIDTHS = (8, 4, 3, 2, 1)
"""Bits per code that can be chosen."""

# The levels with the least mean square error for a unit Gaussian (Max 1960, Lloyd 1982), positive half.
LEVELS = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
}


class Uniform:
    """Codes -q..q evenly spaced, the token's largest value at q."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.lowest = -(2 ** (bits - 1) - 1)

    def quantize(self, values: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return codes and per-token scales; with noise in [0, 1) round stochastically, else to nearest."""
        largest = -self.lowest
        # Scaled up before it is rounded to bf16, so that the largest value never needs a code beyond q.
        scales = (values.abs().amax(-1, keepdim=True) / largest * (1 + 2.0**-8)).to(FORMAT)
        ratio = values / scales.to(values.dtype).clamp_min(torch.finfo(FORMAT).tiny)
        codes = ratio.round() if noise is None else (ratio + noise).floor()
        # A value that is not finite makes its token's scale not finite, which is what tells the receiver.
        return codes.nan_to_num(0.0, largest, -largest).clamp(-largest, largest).to(FORMAT), scales

    def dequantize(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply codes by their token's scale."""
        return codes.to(dtype) * scales.to(dtype)

    def error_bound(self, values: Tensor) -> Tensor:
        _, scales = self.quantize(values)
        return scales.to(values.dtype).expand_as(values) * 0.5001 + torch.finfo(FORMAT).tiny


class Gaussian:
    """Codes 0..2^bits-1 for the levels that suit a Gaussian, the token's root mean square at 1."""

    lowest = 0

    def __init__(self, bits: int) -> None:
        self.bits = bits
        half = torch.tensor(LEVELS[bits], dtype=torch.float64)
        self.levels = torch.cat((-half.flip(0), half))
        self.middles = (self.levels[1:] + self.levels[:-1]) / 2

    def quantize(self, values: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return codes and per-token scales; with noise in [0, 1) round stochastically between the outermost levels, else to nearest."""
        scales = values.square().mean(-1, keepdim=True).sqrt()
        # The mean of squares overflows or vanishes where the values themselves do not.
        plain = scales.isfinite() & (scales > 0)
        scales = scales.where(plain, values.abs().amax(-1, keepdim=True)).to(FORMAT)
        ratio = (values / scales.to(values.dtype).clamp_min(torch.finfo(FORMAT).tiny)).nan_to_num(0.0)
        if noise is None:
            codes = torch.bucketize(ratio, self.middles.to(ratio))
        else:
            levels = self.levels.to(ratio)
            above = torch.bucketize(ratio, levels).clamp(1, len(levels) - 1)
            low, high = levels[above - 1], levels[above]
            codes = above - 1 + ((ratio - low) / (high - low) > noise).long()
        return codes.to(FORMAT), scales

    def dequantize(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply each code's level by its token's scale."""
        return self.levels.to(codes.device, dtype)[codes.long()] * scales.to(dtype)

    def error_bound(self, values: Tensor) -> Tensor:
        _, scales = self.quantize(values)
        inside = scales.to(values.dtype) * float(self.levels[-1] - self.levels[-2] if self.bits > 1 else self.levels[-1])
        outside = (values.abs() - scales.to(values.dtype) * float(self.levels[-1])).clamp_min(0)
        return inside + outside + torch.finfo(FORMAT).tiny


def make_grid(bits: int) -> Uniform | Gaussian:
    """Return the grid for a number of bits: Gaussian levels where an even spacing would waste the few codes."""
    return Gaussian(bits) if bits in LEVELS else Uniform(bits)
