"""The quantiser: exact layout, bound, unbiased gradients, noise that does not depend on the cut."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY
from thinwire.bits.codes import pack_codes, unpack_codes
from thinwire.bits.grid import WIDTHS, make_grid
from thinwire.bits.raw import TensorSpec
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.quantize import QuantizeEntry
from thinwire.model.ends import Context


def test_bit_layout():
    codes = torch.tensor([-7.0, 0, 7, 1, 3], dtype=torch.bfloat16)
    assert pack_codes(codes, 4, -7) == bytes([0 | 7 << 4, 14 | 8 << 4, 10])
    assert pack_codes(torch.tensor([-127.0, 0, 127]), 8, -127) == bytes([0, 127, 254])
    assert pack_codes(torch.tensor([0.0, 1, 2, 3, 0]), 2) == bytes([0 | 1 << 2 | 2 << 4 | 3 << 6, 0])
    assert pack_codes(torch.tensor([7.0, 0, 5]), 3) == bytes([7 | 0 << 3 | (5 << 6) & 255, 5 >> 2])


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63])
def test_every_code_survives(bits, count):
    lowest = make_grid(bits).lowest
    codes = torch.arange(lowest, lowest + 2**bits - (lowest < 0)).repeat(count)[:count].to(torch.bfloat16)
    data = pack_codes(codes, bits, lowest)
    spec = TensorSpec((count,), torch.bfloat16, len(data), len(data))
    assert len(data) == -(-count * bits // 8)
    assert torch.equal(unpack_codes(data, bits, spec, lowest), codes)


@pytest.mark.parametrize("bits, expected", [(8, 0.0074), (4, 0.127), (3, 0.186), (2, 0.343), (1, 0.603)])
def test_error_on_gaussian_values(bits, expected):
    """Relative RMS error for 256 values per token: absmax / q / sqrt(12), or that of the best levels for a Gaussian."""
    values = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    grid = make_grid(bits)
    error = float((grid.dequantize(*grid.quantize(values), torch.float32) - values).norm() / values.norm())
    assert error == pytest.approx(expected, rel=0.1)


def test_stochastic_rounding_is_unbiased():
    gradient = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    received, grid = torch.zeros_like(gradient), make_grid(4)
    for step in range(400):
        codes = torch.zeros(1, 1, 64, dtype=torch.bfloat16, requires_grad=True)
        scales = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
        entry = QuantizeEntry(4, 4, True, torch.float32, layer=2, seed=0)
        entry((codes, scales), torch.zeros(1, 1), Context(step, torch.tensor([7]))).backward(gradient[None])
        received += grid.dequantize(codes.grad, scales.grad, torch.float32)[0] / 400
    step_size = float(gradient.abs().max()) / 7
    assert (received - gradient).abs().max() < 4 * step_size / 2 / 400**0.5


def test_noise_belongs_to_the_sample_not_to_the_microbatch():
    entry = QuantizeEntry(4, 4, True, torch.float32, layer=2, seed=0)
    gradient = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))

    def codes_of(rows: slice) -> torch.Tensor:
        count = len(gradient[rows])
        codes = torch.zeros(count, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        scales = torch.zeros(count, 3, 1, dtype=torch.bfloat16, requires_grad=True)
        entry((codes, scales), torch.zeros(count, 3), Context(1, torch.arange(10, 14)[rows])).backward(gradient[rows])
        return codes.grad

    together = codes_of(slice(0, 4))
    assert torch.equal(together, torch.cat([codes_of(slice(0, 1)), codes_of(slice(1, 4))]))


def test_rounding_to_nearest_draws_no_numbers():
    entries = [QuantizeEntry(4, 3, False, torch.float32, layer=2, seed=seed) for seed in (0, 1)]
    gradient = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for step, entry in enumerate(entries):
        codes = torch.zeros(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        scales = torch.zeros(2, 3, 1, dtype=torch.bfloat16, requires_grad=True)
        entry((codes, scales), torch.zeros(2, 3), Context(step, torch.arange(2))).backward(gradient)
        found.append(codes.grad)
    assert torch.equal(*found) and torch.equal(found[0], make_grid(3).quantize(gradient)[0])


def test_directions_can_have_different_bits():
    codec = make_codec(codec_defaults("dense", bits=8, backward_bits=3), TINY)
    spec = codec.spec(3, 5)
    assert spec.bytes_per_token("forward") == TINY.width + 2
    assert spec.bytes_per_token("backward") == TINY.width * 3 / 8 + 2


@pytest.mark.parametrize("bits", [0, 5, 16])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=rf"codec.bits is {bits}; it can be 8, 4, 3, 2 or 1"):
        make_codec(codec_defaults("subspace", bits=bits), TINY)
