"""Sparse tensors in bytes: exact, as short as stated, and refused when damaged; their mean over replicas, either way."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.bits.codes import pack_codes
from thinwire.bits.mask import AS_POSITIONS, BITMAP
from thinwire.bits.sparse import WIDTH, Sparse
from thinwire.replicas import sparse_mean as module
from thinwire.replicas.sparse_mean import gather_share, packed_share, sparse_mean, two_shots_share
from thinwire.testing.together import together

GRAPHS = ["complete", "ring", "torus", "0-1,1-2,2-3"]


def sparse_tensor(*shape: int, density: float, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values, count = torch.randn(shape, generator=generator, dtype=dtype), math.prod(shape)
    dropped = torch.randperm(count, generator=generator)[round(density * count) :]
    return values.view(-1).index_fill_(0, dropped, 0).view(shape)


def packed_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor should take, counted by hand."""
    width = min(WIDTH, tensor.numel())
    rows, kept = math.ceil(tensor.numel() / width), int(tensor.count_nonzero())
    by_position = math.ceil(rows * width.bit_length() / 8) + math.ceil(kept * (width - 1).bit_length() / 8)
    return 1 + min(math.ceil(rows * width / 8), by_position) + kept * tensor.dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.01, 0.1, 0.5, 1.0])
def test_tensors_come_back_in_as_many_bytes_as_counted(density, dtype):
    shapes = [(40, 50), (3, 700), (512, 4), (7, 3, 11), (1, 1), (0, 8)]
    tensors = [sparse_tensor(*shape, density=density, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    data = Sparse().pack(tensors)
    found = Sparse().unpack(data, tensors, 1)
    assert all(torch.equal(one, other) and one.dtype == dtype for one, other in zip(found, tensors, strict=True))
    assert len(data) == sum(packed_bytes(tensor) for tensor in tensors if tensor.numel())


def test_the_shorter_form_is_taken():
    assert Sparse().pack([sparse_tensor(64, 64, density=0.01)])[:1] == AS_POSITIONS
    assert Sparse().pack([sparse_tensor(64, 64, density=0.5)])[:1] == BITMAP


def test_values_that_are_not_finite_come_back():
    tensor = torch.zeros(30, 30)
    tensor[3, 4], tensor[5, 6], tensor[7, 8] = math.nan, math.inf, -math.inf
    (found,) = Sparse().unpack(Sparse().pack([tensor]), [tensor], 1)
    assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize("density", [0.02, 0.6])
def test_a_message_cut_anywhere_or_too_long_is_refused_by_name(density):
    like = [sparse_tensor(20, 30, density=density), sparse_tensor(8, 9, density=density, seed=1)]
    data = Sparse().pack(like)
    for length in range(0, len(data), 3):
        with pytest.raises(ValueError, match="replica 2 sent"):
            Sparse().unpack(data[:length], like, 2)
    with pytest.raises(ValueError, match="replica 2 sent 3 bytes behind"):
        Sparse().unpack(data + b"\0\0\0", like, 2)


def by_position(numbers: list[int], positions: list[int], kept: int) -> bytes:
    """Write a tensor of two rows, 600 values, as its sender might."""
    codes = pack_codes(torch.tensor(numbers), 10) + pack_codes(torch.tensor(positions, dtype=torch.int64), 9)
    return AS_POSITIONS + codes + bytes(4 * kept)


@pytest.mark.parametrize(
    "numbers, positions, message",
    [
        ([2, 1], [5, 5, 7], "rising positions"),
        ([2, 1], [9, 5, 7], "rising positions"),
        ([1, 1], [5, 88], "a position among 600 values is 600"),
        ([1, 1], [5, 511], "a position among 600 values is 1023"),
        ([1023, 1023], [], "payload of 0 bytes where 2302 were declared"),
    ],
)
def test_wrong_positions_are_refused(numbers, positions, message):
    like = [torch.zeros(20, 30)]
    assert Sparse().unpack(by_position([2, 1], [5, 9, 87], 3), like, 1)[0].shape == (20, 30)
    with pytest.raises(ValueError, match=f"replica 1 sent a damaged sparse tensor, number 0 of 1: .*{message}"):
        Sparse().unpack(by_position(numbers, positions, len(positions)), like, 1)


def test_a_bitmap_that_reaches_behind_the_tensor_and_an_unknown_form_are_refused():
    like = [torch.zeros(20, 30)]
    with pytest.raises(ValueError, match="a position among 600 values is 1023"):
        Sparse().unpack(BITMAP + bytes(127) + b"\x80" + bytes(4), like, 1)
    with pytest.raises(ValueError, match="a mask that begins with"):
        Sparse().unpack(b"\x07" + bytes(200), like, 1)


def of_replica(replica: int, density: float, dtype: torch.dtype) -> list[torch.Tensor]:
    return [sparse_tensor(*shape, density=density, seed=9 * replica + size, dtype=dtype) for size, shape in enumerate([(30, 40), (3, 300)])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("density", [0.01, 0.4])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_mean_is_right_and_the_same_everywhere(graph, density, dtype):
    results = together(4, lambda peers: sparse_mean(peers, of_replica(peers.index, density, dtype), density), graph)
    expected = [torch.stack(group).mean(0) for group in zip(*(of_replica(replica, density, dtype) for replica in range(4)), strict=True)]
    for tensors in results:
        for found, first, wanted in zip(tensors, results[0], expected, strict=True):
            assert torch.equal(found, first) and found.dtype == dtype
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_few_values_are_gathered_and_many_are_summed_in_two_shots():
    def task(peers, density):
        sparse_mean(peers, of_replica(peers.index, density, torch.float32), density)
        return peers.sent

    for replica, sent in enumerate(together(4, lambda peers: task(peers, 0.01))):
        assert sent == 3 * sum(map(packed_bytes, of_replica(replica, 0.01, torch.float32)))
    total = sum(together(4, lambda peers: task(peers, 0.4)))
    assert total < 3 * sum(packed_bytes(tensor) for replica in range(4) for tensor in of_replica(replica, 0.4, torch.float32))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
def test_what_a_mean_costs_is_what_is_reckoned(density, count, monkeypatch):
    """The bytes of both ways are within 3 % of the shares that the choice between them goes by."""
    shape = (512, 256)

    def task(peers):
        sparse_mean(peers, [sparse_tensor(*shape, density=density, seed=peers.index)], density)
        return peers.sent

    size = 4 * math.prod(shape)
    assert len(Sparse().pack([sparse_tensor(*shape, density=density)])) == pytest.approx(size * packed_share(density, 32), rel=0.03)
    for cheap, share in (("gather_share", gather_share), ("two_shots_share", two_shots_share)):
        with monkeypatch.context() as patch:
            patch.setattr(module, cheap, lambda *_: -1.0)
            assert sum(together(count, task)) == pytest.approx(count * size * share(density, count, 32), rel=0.03)


def test_no_tensors_need_no_message():
    assert together(2, lambda peers: (sparse_mean(peers, [], 0.1), peers.sent)) == [([], 0)] * 2
