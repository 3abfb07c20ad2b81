"""The quantiser: exact layout, bound, unbiased gradients, noise that does not depend on the cut."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY
from thinwire.codecs import registry
from thinwire.codecs.base import Context, TensorSpec
from thinwire.codecs.quantize import QuantizeEntry, dequantize, pack_codes, quantize, unpack_codes


def test_bit_layout():
    codes = torch.tensor([-7.0, 0, 7, 1, 3], dtype=torch.bfloat16)
    assert pack_codes(codes, 4) == bytes([0 | 7 << 4, 14 | 8 << 4, 10])
    assert pack_codes(torch.tensor([-127.0, 0, 127]), 8) == bytes([0, 127, 254])
    assert pack_codes(torch.tensor([-1.0, 0, 1, 1, -1]), 2) == bytes([0 | 1 << 2 | 2 << 4 | 2 << 6, 0])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63])
def test_every_code_survives(bits, count):
    qmax = 2 ** (bits - 1) - 1
    codes = torch.arange(-qmax, qmax + 1).repeat(count)[:count].to(torch.bfloat16)
    data = pack_codes(codes, bits)
    spec = TensorSpec((count,), torch.bfloat16, len(data), len(data))
    assert len(data) == -(-count * bits // 8)
    assert torch.equal(unpack_codes(data, bits, spec), codes)


@pytest.mark.parametrize("bits, expected", [(8, 0.0074), (4, 0.134), (2, 1.0)])
def test_error_on_gaussian_values(bits, expected):
    """Relative RMS error for 256 values per token: about absmax / qmax / sqrt(12) with absmax near 2.8."""
    values = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    error = float((dequantize(*quantize(values, bits), torch.float32) - values).norm() / values.norm())
    assert error < 1.1 * expected


def test_stochastic_rounding_is_unbiased():
    gradient = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    received = torch.zeros_like(gradient)
    for step in range(400):
        codes = torch.zeros(1, 1, 64, dtype=torch.bfloat16, requires_grad=True)
        scales = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
        entry = QuantizeEntry(4, torch.float32, boundary=2, seed=0)
        entry((codes, scales), torch.zeros(1, 1), Context(step, torch.tensor([7]))).backward(gradient[None])
        received += dequantize(codes.grad, scales.grad, torch.float32)[0] / 400
    step_size = float(gradient.abs().max()) / 7
    assert (received - gradient).abs().max() < 4 * step_size / 2 / 400**0.5


def test_noise_belongs_to_the_sample_not_to_the_microbatch():
    entry = QuantizeEntry(4, torch.float32, boundary=2, seed=0)
    gradient = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))

    def codes_of(rows: slice) -> torch.Tensor:
        count = len(gradient[rows])
        codes = torch.zeros(count, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        scales = torch.zeros(count, 3, 1, dtype=torch.bfloat16, requires_grad=True)
        entry((codes, scales), torch.zeros(count, 3), Context(1, torch.arange(10, 14)[rows])).backward(gradient[rows])
        return codes.grad

    together = codes_of(slice(0, 4))
    assert torch.equal(together, torch.cat([codes_of(slice(0, 1)), codes_of(slice(1, 4))]))


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=rf"codec.bits is {bits}; it can be 8, 4 or 2"):
        registry.build(registry.defaults("subspace", bits=bits), TINY)
