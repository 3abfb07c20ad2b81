"""The mean of sparse tensors over all replicas, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.bits.mask import position_bits
from thinwire.bits.sparse import WIDTH, Sparse
from thinwire.replicas.allreduce import mean
from thinwire.replicas.peers import Peers


def sparse_mean(peers: Peers, tensors: Sequence[Tensor], density: float) -> list[Tensor]:
    """Return the mean of each tensor over all replicas, bit-identical on each; `density` is what all of them expect theirs to be.

    Replicas that are all joined either hand each other everything, or sum shares in two shots: sums are denser, but each travels once.
    """
    if not tensors:
        return []
    form = (density, peers.count, 8 * tensors[0].dtype.itemsize)
    if not peers.graph.complete or two_shots_share(*form) < gather_share(*form):
        return mean(peers, tensors, Sparse())
    packing = Sparse()
    totals = [torch.zeros_like(tensor) for tensor in tensors]
    for replica, data in enumerate(peers.gather(packing.pack(tensors))):
        for total, tensor in zip(totals, packing.unpack(data, tensors, replica), strict=True):
            total += tensor
    return [total / peers.count for total in totals]


def packed_share(density: float, bits: int) -> float:
    """Return the packed size of a large tensor, as a share of its size as numbers of `bits` bits."""
    mask = min(1.0, WIDTH.bit_length() / WIDTH + position_bits(WIDTH) * density)
    return density + mask / bits


def gather_share(density: float, count: int, bits: int) -> float:
    """Return what one of `count` replicas sends when it hands every other its tensor, in sizes of the tensor."""
    return (count - 1) * packed_share(density, bits)


def two_shots_share(density: float, count: int, bits: int) -> float:
    """Return what one of `count` replicas sends for a mean in two shots, in sizes of the tensor, if supports are independent."""
    union = 1 - (1 - density) ** count
    return (count - 1) / count * (packed_share(density, bits) + packed_share(union, bits))
