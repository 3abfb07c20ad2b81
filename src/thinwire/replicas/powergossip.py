"""powergossip: neighbours bring their parameters closer by low-rank parts of their difference (systems, section 3).

No replica ever knows the mean. On an edge, both ends hold the same directions. In one iteration each end sends what its matrix makes of
them, X Q or X^T P by turns; the difference of the two products and the directions are a low-rank part D of X_high - X_low, of which
the higher end gives up the share W and the lower one takes it on. Both compute D from the same numbers, so what one loses the other
wins and the mean of all stays. Each product is the next iteration's directions: successive steps are a power iteration on the difference,
and only the last product is state. Parameters of one dimension gossip whole, once a step.

A direction that has become nothing says nothing, and would stay nothing for ever: both ends draw it anew. So nothing need be skipped at
the start, where the replicas are still equal in part. After the last step of the run the replicas take the exact mean: one model remains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.bits.packing import Raw
from thinwire.config.sections import RunConfig
from thinwire.model.initial import draw_normal
from thinwire.model.subspace.drift import carry_over
from thinwire.optim.optimizers import StageOptimizer
from thinwire.replicas.allreduce import average, refuse_gaps
from thinwire.replicas.exchange import Exchange, ExchangeOptions, Named, flat

EPS = 1e-8
"""A direction at most this long is drawn anew."""
COUNTER = "counter"


def orthonormal(directions: Tensor, drawn: Callable[[], Tensor]) -> Tensor:
    """Return columns of unit length at right angles that span the directions; what is too short is drawn first."""
    lengths = torch.linalg.vector_norm(directions, dim=-2, keepdim=True)
    if bool((lengths <= EPS).any()):
        directions = torch.where(lengths <= EPS, drawn(), directions)
        lengths = torch.linalg.vector_norm(directions, dim=-2, keepdim=True)
    # QR keeps its columns orthonormal where directions depend on each other, as those of a difference of low rank do.
    return directions / lengths if directions.shape[-1] == 1 else torch.linalg.qr(directions).Q


def product(matrix: Tensor, basis: Tensor, forward: bool) -> Tensor:
    """Return what an end sends: its matrix, or its transpose, times the basis."""
    return matrix @ basis if forward else matrix.mT @ basis


def part(difference: Tensor, basis: Tensor, forward: bool) -> Tensor:
    """Return the part D of X_high - X_low that the difference of two products is: (X_high - X_low) Q Q^T or P P^T (X_high - X_low)."""
    return difference @ basis.mT if forward else basis @ difference.mT


def goes_forward(iteration: int) -> bool:
    """Tell whether an iteration, counted from 0 over all steps, sends X Q; the others send X^T P."""
    return iteration % 2 == 0


def directions_drawn(seed: int, edge: tuple[int, int], name: str, iteration: int, shape: tuple[int, int], rank: int) -> Tensor:
    """Draw the directions in which an m x n matrix is looked at: n x r in forward iterations, m x r in others."""
    length = shape[1] if goes_forward(iteration) else shape[0]
    return draw_normal(seed, f"powergossip/{edge[0]}-{edge[1]}/{name}/{iteration}", (length, min(rank, *shape)))


@dataclass(frozen=True, kw_only=True)
class PowerGossipOptions(ExchangeOptions):
    """How much neighbours tell each other in a step."""

    rank: int = 1
    """Directions per matrix and iteration."""
    iterations: int = 8
    """Iterations after each step; more of them at rank 1 are worth more than a higher rank."""
    warm: bool = True
    """Begin with the last iteration's directions; false draws new ones each time."""

    def check(self, config: RunConfig) -> None:
        for option, value in (("rank", self.rank), ("iterations", self.iterations)):
            if value < 1:
                raise ValueError(f"exchange.{option} is {value}; choose at least 1, such as 1 for rank and 8 for iterations")


class PowerGossip(Exchange):
    """Bring the parameters of neighbours closer after every step."""

    Options = PowerGossipOptions

    def talks_after(self, step: int) -> bool:
        return True

    @torch.no_grad()
    def parameters(self, named: Named, optimizer: StageOptimizer, step: int) -> None:
        if step == self.config.train.steps - 1:
            average(self.peers, named.values())
            return
        matrices = {name: tensor.view(len(tensor), -1) for name, tensor in named.items() if tensor.dim() > 1}
        vectors = [tensor for tensor in named.values() if tensor.dim() < 2]
        begin = int(self.state[COUNTER]) if self.state else 0
        directions = dict(self.state)
        for iteration in range(begin, begin + self.options.iterations):
            self._iterate(matrices, vectors if iteration == begin else [], directions, iteration)
        # Along the last directions only: the neighbours are at least this far apart.
        self.figures["distance"] = max(
            float(flat({name: directions[self._name(peer, name)] for name in matrices}).norm()) for peer in self.peers.wires
        )
        directions[COUNTER] = torch.tensor(begin + self.options.iterations)
        for name, tensor in directions.items():
            if self.options.warm or name == COUNTER:
                self.propose(name, tensor)

    def _iterate(self, matrices: Named, vectors: list[Tensor], directions: dict[str, Tensor], iteration: int) -> None:
        """Send every neighbour the products of all matrices, and give up or take on a share of the differences."""
        forward, packing = goes_forward(iteration), Raw()
        bases = {peer: self._bases(peer, matrices, directions, iteration) for peer in self.peers.wires}
        own = {
            peer: [product(matrix, basis, forward) for matrix, basis in zip(matrices.values(), found, strict=True)] + vectors
            for peer, found in bases.items()
        }
        came = self.peers.swap({peer: packing.pack(products) for peer, products in own.items()})
        theirs = {peer: packing.unpack(data, own[peer], peer) for peer, data in came.items()}
        kept = [vector.clone() for vector in vectors]  # every neighbour's difference is to this replica as it was
        for peer in own:
            higher = peer < self.peers.index
            share = self.peers.graph.weight(peer, self.peers.index) * (-1 if higher else 1)
            for (name, matrix), here, there, basis in zip(matrices.items(), own[peer], theirs[peer], bases[peer], strict=False):
                difference = here - there if higher else there - here
                matrix.add_(part(difference, basis, forward), alpha=share)
                directions[self._name(peer, name)] = difference
            for vector, before, there in zip(vectors, kept, theirs[peer][len(matrices) :], strict=True):
                vector.add_(before - there if higher else there - before, alpha=share)

    def _bases(self, peer: int, matrices: Named, directions: Mapping[str, Tensor], iteration: int) -> list[Tensor]:
        """Return for each matrix the basis that both ends of an edge hold."""
        bases = []
        for name, matrix in matrices.items():

            def drawn(name: str = name, matrix: Tensor = matrix) -> Tensor:
                edge = min(peer, self.peers.index), max(peer, self.peers.index)
                shape = matrix.shape[0], matrix.shape[1]
                return directions_drawn(self.config.seed, edge, name, iteration, shape, self.options.rank).to(matrix)

            found = directions.get(self._name(peer, name)) if self.options.warm else None
            bases.append(orthonormal(drawn() if found is None else found, drawn))
        return bases

    def _name(self, peer: int, name: str) -> str:
        low, high = sorted((peer, self.peers.index))
        return f"direction.{low}-{high}/{name}"

    def load_state(self, state: Named) -> None:
        refuse_gaps("powergossip", state, {COUNTER: ()})
        needed: dict[str, tuple[int, ...]] = {COUNTER: ()}
        if self.options.warm:
            for name, tensor in self.parameters_of_stage.items():
                if tensor.dim() > 1:
                    rows, columns = len(tensor), tensor.numel() // len(tensor)
                    length = columns if goes_forward(int(state[COUNTER])) else rows
                    needed |= {self._name(peer, name): (length, min(rows, columns, self.options.rank)) for peer in self.peers.wires}
        refuse_gaps("powergossip", state, needed)
        super().load_state({name: state[name] for name in needed})

    def carry_over(self, rotation_KK: Tensor, axes: Mapping[str, int]) -> None:
        """Carry directions that lie along coordinates over to a moved basis."""
        axis = 1 if self.state and goes_forward(int(self.state[COUNTER])) else 0
        for name, tensor in self.state.items():
            if axes.get(name.partition("/")[2]) == axis:
                carry_over(tensor, rotation_KK, 0)
