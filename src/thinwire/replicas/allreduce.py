"""allreduce: every replica gets the mean of all gradients, to the same bit.

Two shots where all replicas are joined (systems, section 7): each sends every other its share of the rows, adds up the share that is its
own in a fixed order, and sends the sum round. So a lossy packing is applied exactly twice to each value. On any other graph the sum
goes up a tree to replica 0 and the total comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.replicas.exchange import Exchange, Named, Options
from thinwire.replicas.packing import Raw
from thinwire.replicas.peers import Peers


class Packing(Protocol):
    """What a mean may be sent in: see `packing.py`."""

    def pack(self, matrices: Sequence[Tensor]) -> bytes: ...

    def unpack(self, data: bytes, like: Sequence[Tensor], peer: int) -> list[Tensor]: ...


@torch.no_grad()
def mean(peers: Peers, tensors: Sequence[Tensor], packing: Packing | None = None) -> list[Tensor]:
    """Return the mean of each tensor over all replicas, bit-identical on each of them; sums are at least fp32."""
    packing = packing or Raw()
    wide = [tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    matrices = [tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1) for tensor in wide]
    if peers.count > 1:
        total = _two_shots(peers, matrices, packing) if peers.graph.complete else _tree(peers, matrices, packing)
        matrices = [matrix / peers.count for matrix in total]
    return [matrix.view(tensor.shape).to(tensor.dtype) for matrix, tensor in zip(matrices, tensors, strict=True)]


def _two_shots(peers: Peers, matrices: Sequence[Tensor], packing: Packing) -> list[Tensor]:
    shares = [_share(matrices, replica, peers.count) for replica in range(peers.count)]
    packed = [packing.pack(share) for share in shares]
    came = peers.swap({peer: packed[peer] for peer in peers.wires})
    came[peers.index] = packed[peers.index]
    own = shares[peers.index]
    total = packing.pack(_sum([packing.unpack(came[replica], own, replica) for replica in range(peers.count)]))
    totals = peers.swap(dict.fromkeys(peers.wires, total))
    totals[peers.index] = total
    parts = [packing.unpack(totals[replica], shares[replica], replica) for replica in range(peers.count)]
    return [torch.cat([part[index] for part in parts]) for index in range(len(matrices))]


def _tree(peers: Peers, matrices: Sequence[Tensor], packing: Packing) -> list[Tensor]:
    parent = peers.graph.parents[peers.index]
    children = peers.graph.children(peers.index)
    came = [packing.unpack(peers.take(child), matrices, child) for child in children]
    total = packing.pack(_sum([list(matrices), *came]))
    if parent is not None:
        peers.give(parent, total)
        total = peers.take(parent)
    for child in children:
        peers.give(child, total)
    return packing.unpack(total, matrices, peers.index if parent is None else parent)


def _share(matrices: Sequence[Tensor], replica: int, count: int) -> list[Tensor]:
    """Return the rows of each matrix that one replica adds up."""
    return [matrix[len(matrix) * replica // count : len(matrix) * (replica + 1) // count] for matrix in matrices]


def _sum(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Add matrices up, in the order given."""
    totals = [matrix.clone() for matrix in lists[0]]
    for matrices in lists[1:]:
        for total, matrix in zip(totals, matrices, strict=True):
            total += matrix
    return totals


@dataclass(frozen=True, kw_only=True)
class AllReduceOptions(Options):
    """What gradients are sent in."""


class AllReduce(Exchange):
    """Average the gradients exactly."""

    Options = AllReduceOptions

    def gradients(self, named: Named, step: int) -> None:
        for gradient, average in zip(named.values(), mean(self.peers, list(named.values())), strict=True):
            gradient.copy_(average)

    def talks_before(self, step: int) -> bool:
        return True
