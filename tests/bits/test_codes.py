"""Codes in bytes: as the plain way in numpy puts them, for every width and any number of them."""

from __future__ import annotations

import pytest
import torch

from packing import numpy_pack, numpy_unpack
from thinwire.bits.codes import pack_codes, packed_size, unpack_codes
from thinwire.bits.raw import TensorSpec

COUNTS = (0, 1, 2, 3, 7, 8, 9, 23, 24, 1000, 1003)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.int16])
def test_the_bytes_are_those_of_the_plain_way(bits, dtype):
    for count in COUNTS:
        unsigned = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(count))
        for lowest in (0, 1 - 2 ** (bits - 1)):
            codes = (unsigned.clamp_max(2**bits - 2 if lowest else 255) + lowest).to(dtype)
            given, spec = codes.clone(), TensorSpec.raw((count,), dtype)
            data = pack_codes(codes, bits, lowest)
            assert len(data) == packed_size(count, bits) and data == numpy_pack(codes, bits, lowest)
            assert torch.equal(codes, given), "what is packed stays as it was"
            back = unpack_codes(data, bits, spec, lowest)
            assert back.dtype == dtype and torch.equal(back, codes) and torch.equal(back, numpy_unpack(data, bits, spec, lowest))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_small_integers_stay_as_they_were(dtype):
    codes = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1], dtype=dtype)
    given = codes.clone()
    assert pack_codes(codes, 1) == bytes([0b01001101, 1]) and torch.equal(codes, given)
    if dtype == torch.int8:
        assert pack_codes(codes, 8, -127) == bytes(127 + value for value in given.tolist()) and torch.equal(codes, given)
