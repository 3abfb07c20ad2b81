"""Packings: what comes back of numbers, in how many bytes, and that bytes from a peer are never taken on trust."""

from __future__ import annotations

import math
import sys
import tracemalloc
import zlib

import pytest
import torch

from thinwire.bits.packing import make_packing

SHAPES = ((7, 33), (1, 5), (1, 257), (1, 512), (0, 4), (3, 0), (1, 0), (64, 1), (5, 1000))
NAMES = ("fp32", "bf16", "int8", "lossless", "zfp3", "zfp8", "zfp32")
DTYPES = (torch.float32, torch.float64)


def packing_of(name: str):
    if name.startswith("zfp"):
        pytest.importorskip("zfpy")
    return make_packing(name)


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def back(name: str, *matrices: torch.Tensor) -> list[torch.Tensor]:
    packing = packing_of(name)
    return packing.unpack(packing.pack(matrices), matrices, 1)


def relative_rms(name: str, values: torch.Tensor) -> float:
    (found,) = back(name, values)
    return float((found - values).double().norm() / values.double().norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_comes_back_and_both_ends_see_the_same(name, dtype):
    matrices = [gaussian(*shape, dtype=dtype) for shape in SHAPES]
    found, again = back(name, *matrices), back(name, *matrices)
    for matrix, one, other in zip(matrices, found, again, strict=True):
        assert one.shape == matrix.shape and one.dtype == dtype and torch.equal(one, other)
        if name in ("fp32", "lossless"):
            assert torch.equal(one, matrix)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_two_formats_go_in_one_message(name):
    matrices = [gaussian(4, 8), gaussian(6, 8, dtype=torch.float64), gaussian(1, 9)]
    alone = [back(name, matrix)[0] for matrix in matrices]
    for one, other in zip(back(name, *matrices), alone, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_a_matrix_needs_no_copy(name):
    matrix = gaussian(8, 12)[2:5, ::2]
    assert torch.equal(back(name, matrix)[0], back(name, matrix.clone())[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(name, value):
    for shape in ((3, 8), (1, 300)):
        matrix = gaussian(*shape)
        matrix[-1, -1] = value
        assert not back(name, matrix)[0].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_other_lengths_are_refused(name):
    packing = packing_of(name)
    matrices = [gaussian(*shape) for shape in SHAPES]
    data = packing.pack(matrices)
    for wrong in (b"", data[:1], data[:-1], data + b"\0", data[: len(data) // 2], data * 2):
        with pytest.raises(ValueError, match=r"replica 3 sent (\d+ bytes where|a payload of)"):
            packing.unpack(wrong, matrices, 3)


@pytest.mark.parametrize("dtype, least", [(torch.float32, 2.0**-126), (torch.float64, 2.0**-126)])
def test_bf16_keeps_its_bound(dtype, least):
    values = gaussian(50, 40, dtype=dtype) * torch.logspace(-44, 38, 50, dtype=dtype).unsqueeze(1) / 8
    (found,) = back("bf16", values)
    bound = (values.abs() * 2.0**-8).where(values.abs() >= least, 2.0**-134)
    assert ((found - values).abs() <= bound).all()
    assert (found != values).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(60, 40), (1, 2400)])
def test_int8_keeps_its_bound_from_denormal_to_huge(dtype, shape):
    limits = torch.finfo(dtype)
    rows = shape[0] if shape[0] > 1 else 10
    sizes = torch.logspace(math.log10(limits.tiny) - 7, math.log10(limits.max), rows, dtype=dtype).clamp_max(limits.max)
    values = gaussian(*shape, dtype=dtype).view(rows, -1)
    values = (values / values.abs().amax(1, keepdim=True) * sizes.unsqueeze(1)).view(shape)
    (found,) = back("int8", values)
    # Blocks of 256 values do not fall together with rows of 240: a vector's bound is that of the block a value is in.
    grouped = values if shape[0] > 1 else torch.nn.functional.pad(values, (0, -values.numel() % 256)).view(-1, 256)
    step = (grouped.abs().amax(1, keepdim=True) / 127).clamp_min(limits.tiny).expand_as(grouped).reshape(-1)[: values.numel()].view(shape)
    assert ((found - values).abs() <= step * 0.5 * (1 + 512 * limits.eps)).all()
    assert found.isfinite().all() and (found != values).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_of_the_largest_numbers_is_finite_and_of_zeros_zero(dtype):
    top = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    for _ in range(40):
        assert back("int8", top.view(1, 1))[0].isfinite().all(), float(top)
        top = torch.nextafter(top, torch.zeros_like(top))
    assert torch.equal(back("int8", torch.zeros(3, 5, dtype=dtype))[0], torch.zeros(3, 5, dtype=dtype))


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    matrix = gaussian(4, 30)
    wanted = back("int8", matrix)[0]
    matrix[2, 7] = math.inf
    found = back("int8", matrix)[0]
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], wanted[[0, 1, 3]])


def test_relative_error_of_int8_on_gaussian_values():
    assert relative_rms("int8", gaussian(400, 512)) == pytest.approx(7.4e-3, rel=0.03)
    assert relative_rms("int8", gaussian(1, 200_000)) == pytest.approx(6.9e-3, rel=0.03)  # the largest of 256 is smaller


def test_an_outlier_spoils_only_its_block_of_a_vector():
    values = gaussian(1, 1024)
    wanted = back("int8", values)[0]
    values[0, 300] = 1e6
    found = back("int8", values)[0]
    changed = (found != wanted).view(4, 256).any(1)
    assert changed.tolist() == [False, True, False, False]


@pytest.mark.parametrize("rate, wanted", [(8, 5.4e-2), (12, 3.4e-3), (16, 2.1e-4), (24, 8e-7)])
def test_relative_error_of_zfp_on_gaussian_values(rate, wanted):
    """The figures of systems.md, 7(f)2, were made without zfpy; it agrees within 3 %."""
    assert relative_rms(f"zfp{rate}", gaussian(100, 1000)) == pytest.approx(wanted, rel=0.05)
    assert wanted / 2 < relative_rms(f"zfp{rate}", gaussian(100, 1000, dtype=torch.float64)) < 2 * wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [3, 8, 11, 32])
def test_size_of_zfp(rate, dtype):
    """Whole blocks of 4 values, whole words of 8 bytes, and a byte in front of all."""
    packing = packing_of(f"zfp{rate}")
    for count in (1, 3, 4, 5, 64, 1001):
        size = -(-(-(-count // 4) * 4 * rate) // 64) * 8
        assert len(packing.pack([gaussian(1, count, dtype=dtype), gaussian(count, 1, dtype=dtype)])) == 1 + 2 * size


def test_sizes_of_the_others():
    matrices = [gaussian(6, 100), gaussian(1, 600), gaussian(4, 10, dtype=torch.float64)]
    assert len(packing_of("fp32").pack(matrices)) == 4 * 1200 + 8 * 40
    assert len(packing_of("bf16").pack(matrices)) == 2 * 1240
    assert len(packing_of("int8").pack(matrices)) == 1240 + 4 * (6 + 3) + 8 * 4


def test_ratio_of_lossless_on_gaussian_values():
    """The ratio of systems.md, 7(f)1; that of bf16 is checked where bf16 travels, at the boundaries (test_lossless.py)."""
    values = gaussian(500, 1000)
    assert values.nbytes / len(packing_of("lossless").pack([values])) == pytest.approx(1.16, rel=0.1)


def test_many_small_tensors_deflate_as_well_as_a_large_one():
    large = gaussian(64, 512)
    small = [row.view(1, -1) for row in large]
    packing = packing_of("lossless")
    assert len(packing.pack(small)) == len(packing.pack([large]))


def test_every_damaged_byte_of_lossless_is_noticed():
    packing, matrix = packing_of("lossless"), gaussian(4, 20)
    data = packing.pack([matrix])
    for place in range(len(data)):
        with pytest.raises(ValueError, match="replica 2 sent a payload of"):
            packing.unpack(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :], [matrix], 2)


def test_a_bomb_takes_no_memory():
    bomb = zlib.compress(bytes(2**24), 9)
    tracemalloc.start()
    with pytest.raises(ValueError, match="replica 0 sent a payload"):
        packing_of("lossless").unpack(bomb, [gaussian(8, 8)], 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_any_bytes_of_the_right_length_are_some_numbers_to_zfp():
    packing, matrix = packing_of("zfp9"), gaussian(5, 7)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        noise = bytes(torch.randint(0, 256, (packing.size(matrix),), generator=generator, dtype=torch.uint8).tolist())
        assert packing.unpack(b"\0" + noise, [matrix], 0)[0].shape == matrix.shape
    with pytest.raises(ValueError, match=r"replica 6 sent a message that starts with 2; it can be 0 .* or 1"):
        packing.unpack(b"\2" + noise, [matrix], 6)


@pytest.mark.parametrize("text", ["", "fp16", "zfp", "zfp8.5", "zfp-8", "int4", "Int8"])
def test_unknown_names_are_refused(text):
    with pytest.raises(ValueError, match=f"unknown packing '{text}'; choose fp32, bf16, int8, lossless, or zfp"):
        make_packing(text)


@pytest.mark.parametrize("rate", [0, 2, 33])
def test_rates_that_make_no_sense_are_refused(rate):
    with pytest.raises(ValueError, match=rf"zfp is given {rate} bits per value; choose 3 to 32"):
        make_packing(f"zfp{rate}")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "zfpy", None)
    with pytest.raises(ValueError, match="zfp8 needs the package zfpy") as caught:
        make_packing("zfp8")
    for part in ("zfpy", "pip install -c constraints.txt -e '.[zfp]'"):
        assert part in str(caught.value)
