"""Test 5 of the method: ids survive the wire; and what a boundary refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import TINY
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.pipeline.boundary import Boundary, Packed


def boundary(vocabulary: int) -> Boundary:
    model = replace(TINY, vocabulary=vocabulary, context=4)
    return Boundary(make_codec(codec_defaults("subspace", rank=4, fixed_cache_mb=0), model), batch=1, time=4)


@pytest.mark.parametrize("vocabulary, width", [(65_536, 2), (65_537, 4), (150_000, 4)])
def test_ids_survive_the_wire(vocabulary, width):
    ids = torch.tensor([[0, 255, 256, 65_535, vocabulary - 1]])
    edge = boundary(vocabulary)
    packed = edge.pack([torch.zeros(1, 4, 4, dtype=torch.bfloat16)], "forward", 0, ids)
    assert len(packed.ids) == 5 * width == edge.ids_slot.spec.forward_bytes
    assert edge.ids_slot.spec.backward_bytes == 0
    assert torch.equal(edge.unpack_ids(packed), ids)


def test_a_payload_with_too_few_tensors_is_refused():
    with pytest.raises(ValueError, match="payload of 0 tensors where 1 were declared"):
        boundary(97).unpack(Packed(0, b"", ()), "forward", 0)


def test_a_payload_of_another_basis_is_refused():
    edge = boundary(97)
    packed = edge.pack([torch.zeros(1, 4, 4, dtype=torch.bfloat16)], "forward", 3)
    with pytest.raises(ValueError, match="basis version 3 where version 4 is in use"):
        edge.unpack(packed, "forward", 4)
