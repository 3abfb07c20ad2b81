"""Entropy coding: the same bits, the ratios of unstructured data, and damaged bytes refused without taking memory."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
import torch

from helpers import TINY, gradients, make_pipeline, random_ids
from thinwire.bits.grid import make_grid
from thinwire.bits.planes import deflate, inflate, join_planes, split_planes
from thinwire.bits.raw import TensorSpec, raw_bytes
from thinwire.codecs.base import Codec
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.lossless import DEFLATED, PLAIN


def build(**options) -> Codec:
    return make_codec(codec_defaults("lossless", **options), TINY)


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype, wanted", [("fp32", 1.16), ("bf16", 1.39)])
@pytest.mark.parametrize("level", [0, 1])
def test_ratio_on_gaussian_values(dtype, wanted, level):
    codec = build(dtype=dtype, level=level)
    values = gaussian(64, 488, 32).to(codec.wire_dtype)
    (spec,) = codec.spec(64, 488).tensors
    data = codec.pack(0, values, "forward")
    assert values.nbytes / len(data) == pytest.approx(wanted, rel=0.1)
    assert torch.equal(codec.unpack(0, data, spec, "forward"), values)


@pytest.mark.parametrize("bits, wanted", [(8, 1.07), (4, 1.21), (3, 1.04), (2, 1.03), (1, 1.0)])
def test_ratio_on_codes(bits, wanted):
    codec = make_codec(codec_defaults("quantize", bits=bits), TINY)
    codes, _ = make_grid(bits).quantize(gaussian(1000, 256))
    spec = TensorSpec(tuple(codes.shape), codes.dtype, 32000 * bits + 1, 32000 * bits + 1, exact=False)
    data = build(bits=bits).pack(0, codes, "forward")
    assert len(codec.pack(0, codes, "forward")) / len(data) == pytest.approx(wanted, rel=0.02)
    assert torch.equal(build(bits=bits).unpack(0, data, spec, "forward"), codes)


def test_every_bit_pattern_survives():
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(1, 2048, 32)
    codec = build()
    (spec,) = codec.spec(1, 2048).tensors
    assert raw_bytes(codec.unpack(0, codec.pack(0, values, "forward"), spec, "forward")) == raw_bytes(values)


def test_noise_takes_one_byte_more_and_zeros_hardly_any():
    codec = build(dtype="fp32")
    (spec,) = codec.spec(8, 12).tensors
    noise = torch.randint(-(2**31), 2**31, (8, 12, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0)).view(torch.float32)
    data = codec.pack(0, noise, "forward")
    assert data[0] == PLAIN and len(data) == spec.forward_bytes == noise.nbytes + 1
    assert len(build(dtype="fp32", level=1).pack(0, torch.zeros(8, 12, 32), "forward")) < noise.nbytes / 100


@pytest.mark.parametrize("period", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 11, 12])
def test_planes(period, size):
    data = bytes(range(size))
    assert join_planes(split_planes(data, period), period) == data
    assert split_planes(b"abcdefgh", 3) == b"adgbehcf"


@pytest.mark.parametrize("bits", [None, 4, 3])
def test_training_is_bit_for_bit_that_without_it(bits):
    plain = make_pipeline("quantize" if bits else "dense", dtype="fp32", bits=bits)
    coded = make_pipeline("lossless", dtype="fp32", bits=bits)
    assert plain.step(random_ids(), 0, 0) == coded.step(random_ids(), 0, 0)
    wanted = gradients(plain)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(coded).items())
    if bits is None:
        assert coded.boundaries[0].meter.forward < plain.boundaries[0].meter.forward


def test_damaged_bytes_are_refused():
    codec, values = build(), gaussian(1, 12, 32).bfloat16()
    (spec,) = codec.spec(1, 12).tensors
    data = codec.pack(0, values, "forward")
    assert data[0] == DEFLATED
    damaged = [data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :] for place in range(len(data))]
    for wrong in (*damaged, b"", data[:1], data[:-1], data + b"\0", data[:1] + deflate(bytes(767), 0), data[:1] + deflate(bytes(769), 0)):
        with pytest.raises(ValueError, match="bytes where"):
            codec.unpack(0, wrong, spec, "forward")


def test_a_bomb_takes_no_memory():
    bomb = zlib.compress(bytes(2**26), 9)
    tracemalloc.start()
    with pytest.raises(ValueError, match="bytes where"):
        inflate(bomb, 768)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("level", [-1, 10])
def test_other_levels_are_refused(level):
    with pytest.raises(ValueError, match=rf"codec.level is {level}; it can be 0 to 9"):
        build(level=level)
