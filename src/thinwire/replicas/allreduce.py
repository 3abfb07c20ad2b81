"""allreduce: every replica gets the mean of all gradients, to the same bit.

Two shots where all replicas are joined (systems, section 7): each sends every other its share of the rows, adds up the share that is its
own in a fixed order, and sends the sum round. So a lossy packing is applied exactly twice to each value. On any other graph the sum
goes up a tree to replica 0 and the total comes back: packed once at each replica on the way up, and that of replica 0 for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.bits.packing import Packing, Raw, make_packing
from thinwire.config.sections import RunConfig
from thinwire.replicas.exchange import Exchange, ExchangeOptions, Named
from thinwire.replicas.peers import Peers


@torch.no_grad()
def mean(peers: Peers, tensors: Sequence[Tensor], packing: Packing | None = None, lost: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return the mean of each tensor over all replicas, bit-identical on each of them; sums are at least fp32.

    What the packing loses on this replica is added to `lost`, contiguous tensors of the same form: over all replicas, what went in is
    what came out and what was lost.
    """
    packing = packing or Raw()
    wide = [tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    matrices = [_matrix(tensor) for tensor in wide]
    losses = None if lost is None else [_matrix(tensor) for tensor in lost]
    if peers.count > 1:
        collect = _two_shots if peers.graph.complete else _tree
        matrices = [matrix / peers.count for matrix in collect(peers, matrices, packing, losses)]
    return [matrix.view(tensor.shape).to(tensor.dtype) for matrix, tensor in zip(matrices, tensors, strict=True)]


def average(peers: Peers, tensors: Iterable[Tensor], packing: Packing | None = None) -> None:
    """Put the mean over all replicas into each tensor."""
    tensors = list(tensors)
    for tensor, found in zip(tensors, mean(peers, tensors, packing), strict=True):
        tensor.copy_(found)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)


def _two_shots(peers: Peers, matrices: Sequence[Tensor], packing: Packing, lost: Sequence[Tensor] | None) -> list[Tensor]:
    shares = [_share(matrices, replica, peers.count) for replica in range(peers.count)]
    losses = [None if lost is None else _share(lost, replica, peers.count) for replica in range(peers.count)]
    packed = [_pack(packing, share, loss) for share, loss in zip(shares, losses, strict=True)]
    came = peers.swap({peer: packed[peer] for peer in peers.wires})
    came[peers.index] = packed[peers.index]
    own = shares[peers.index]
    total = _pack(packing, _sum([packing.unpack(came[replica], own, replica) for replica in range(peers.count)]), losses[peers.index])
    totals = peers.swap(dict.fromkeys(peers.wires, total))
    totals[peers.index] = total
    parts = [packing.unpack(totals[replica], shares[replica], replica) for replica in range(peers.count)]
    return [torch.cat([part[index] for part in parts]) for index in range(len(matrices))]


def _tree(peers: Peers, matrices: Sequence[Tensor], packing: Packing, lost: Sequence[Tensor] | None) -> list[Tensor]:
    parent = peers.graph.parents[peers.index]
    children = peers.graph.children(peers.index)
    came = [packing.unpack(peers.take(child), matrices, child) for child in children]
    total = _pack(packing, _sum([list(matrices), *came]), lost)
    if parent is not None:
        peers.give(parent, total)
        total = peers.take(parent)
    for child in children:
        peers.give(child, total)
    return packing.unpack(total, matrices, peers.index if parent is None else parent)


def _pack(packing: Packing, matrices: Sequence[Tensor], lost: Sequence[Tensor] | None) -> bytes:
    """Pack matrices, and add what that loses of them."""
    packed = packing.pack(matrices)
    if lost is not None:
        for loss, matrix, kept in zip(lost, matrices, packing.unpack(packed, matrices, 0), strict=True):
            loss += matrix - kept
    return packed


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


def refuse_gaps(method: str, state: Named, needed: Mapping[str, Sequence[int]]) -> None:
    """Refuse the state of a checkpoint that lacks a tensor of a needed shape."""
    for name, shape in needed.items():
        if name not in state:
            raise ValueError(
                f"the checkpoint holds no {name}, which {method} needs to go on; resume with the exchange that it was made with"
            )
        if state[name].shape != torch.Size(shape):
            raise ValueError(
                f"the checkpoint holds {name} of shape {tuple(state[name].shape)} where {method} needs {tuple(shape)}; "
                "resume with the options of its exchange that it was made with"
            )


@dataclass(frozen=True, kw_only=True)
class AllReduceOptions(ExchangeOptions):
    """What gradients are sent in."""

    packing: str = "fp32"
    """`fp32` loses nothing; `lossless`, `bf16`, `int8`, or `zfp` with bits per value, such as `zfp8`, take fewer bytes."""

    def check(self, config: RunConfig) -> None:
        make_packing(self.packing)


class AllReduce(Exchange):
    """Average the gradients: exactly, or as exactly as their packing is."""

    Options = AllReduceOptions
    options: AllReduceOptions

    def gradients(self, named: Named, step: int) -> None:
        average(self.peers, named.values(), make_packing(self.options.packing))

    def talks_before(self, step: int) -> bool:
        return True
