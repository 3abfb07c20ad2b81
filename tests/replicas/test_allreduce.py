"""The mean over replicas: exact, the same bits everywhere, on any graph."""

from __future__ import annotations

import pytest
import torch

from replicas.together import together
from thinwire.replicas.allreduce import mean


def numbers(replica: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(replica)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((7, 5), (3,), (2, 3, 4), (1, 9))]


@pytest.mark.parametrize("graph", ["complete", "ring", "torus", "0-1,1-2,2-3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_is_exact_and_the_same_everywhere(graph, dtype):
    results = together(4, lambda peers: mean(peers, numbers(peers.index, dtype)), graph)
    expected = [torch.stack(group).mean(0) for group in zip(*(numbers(replica, dtype) for replica in range(4)), strict=True)]
    for tensors in results:
        for found, first, wanted in zip(tensors, results[0], expected, strict=True):
            assert torch.equal(found, first)
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_bytes_are_those_of_two_shots():
    """Each value leaves a replica once as a share and comes back once as a sum: 2 (R - 1) / R of the whole."""

    def task(peers):
        mean(peers, [torch.zeros(8, 16)])
        return peers.sent

    assert together(4, task) == [2 * 3 * 8 * 16 * 4 // 4] * 4


def test_larger_messages_than_a_wire_holds_do_not_hang():
    results = together(2, lambda peers: mean(peers, [torch.full((2048, 1024), float(peers.index))]))
    assert all(torch.equal(tensors[0], torch.full((2048, 1024), 0.5)) for tensors in results)
