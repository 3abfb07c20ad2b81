"""Subnets outside the transformer: what the theory of sketched quadratics predicts (systems, section 5f), and a 3-layer MLP."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from thinwire.bits.packing import Raw
from thinwire.replicas.ist import deal, own_block, put_block

SEED = 11


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def curved(size: int, seed: int) -> Tensor:
    """Return a positive definite matrix, far from diagonal."""
    half = normal(size, size, seed=seed)
    return half @ half.T / size + 0.1 * torch.eye(size, dtype=torch.float64)


def sketched_step(point: Tensor, curvatures: Tensor, pulls: Tensor, scales: Tensor, rate: float, turn: int) -> Tensor:
    """Return x - rate mean_i C_i (L_i C_i x - b_i), with C_i diagonal: `scales[i]` on the coordinates dealt to replica i, 0 elsewhere."""
    sketches = torch.zeros_like(scales)
    for replica, own in enumerate(deal(len(point), [1] * len(scales), SEED, turn)):
        sketches[replica, own] = scales[replica, own]
    products = (curvatures @ (sketches * point)[:, :, None])[:, :, 0]
    return point - rate * (sketches * (products - pulls)).mean(0)


def with_unit_diagonal(curvature: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    root = curvature.diagonal().sqrt()
    return curvature / root / root[:, None], pull / root


def test_the_iterates_of_a_preconditioned_quadratic_follow_the_closed_form():
    """They go to b / sqrt(n), whatever is dealt to whom: not to the optimum, since a gradient at a masked point is biased."""
    size, rate = 16, 0.1
    curvature, pull = with_unit_diagonal(curved(size, 0), normal(size, seed=1))
    begun = point = normal(size, seed=2)
    alike = curvature.expand(size, -1, -1), pull.expand(size, -1), torch.full_like(curvature, size**0.5)
    for turn in range(400):
        left = (1 - rate) ** turn
        assert (point - (left * begun + (1 - left) * pull / size**0.5)).abs().max() < 1e-12
        point = sketched_step(point, *alike, rate, turn)
    assert (point - torch.linalg.solve(curvature, pull)).norm() > 1


def test_without_a_pull_it_converges_at_the_rate_of_the_theory():
    curvature, pull = with_unit_diagonal(curved(16, 3), torch.zeros(16, dtype=torch.float64))
    begun = point = normal(16, seed=4)
    for turn in range(200):
        point = sketched_step(point, curvature.expand(16, -1, -1), pull.expand(16, -1), torch.full_like(curvature, 4.0), 0.1, turn)
    assert (point.norm() / begun.norm()).item() == pytest.approx(0.9**200, rel=1e-6)


def test_different_quadratics_meet_where_the_theory_says_on_average():
    """x_inf = n^-3/2 sum_i D_i^-1/2 b_i."""
    size = 8
    curvatures = torch.stack([curved(size, 10 + replica) for replica in range(size)])
    pulls, roots = normal(size, size, seed=30), curvatures.diagonal(dim1=1, dim2=2).sqrt()
    point, total = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for turn in range(5000):
        point = sketched_step(point, curvatures, pulls, size**0.5 / roots, 0.05, turn)
        total += point
    limit = size**-1.5 * (pulls / roots).sum(0)
    assert (total / 5000 - limit).norm() < 0.05 * limit.norm()


def descent_matrix(curvature: Tensor) -> Tensor:
    """Return W = (L B + B L) / 2 with B = mean_i C_i L C_i of sketches that own one coordinate each, scaled by sqrt(n)."""
    kept = torch.diag(curvature.diagonal())
    return (curvature @ kept + kept @ curvature) / 2


def test_a_curvature_on_which_masked_gradients_lead_uphill_is_flagged():
    """c > 2 a b / (a + b): W is indefinite though L is not, and along its negative direction even a tiny step goes up."""
    curvature = torch.tensor([[1.0, 0.4], [0.4, 0.2]], dtype=torch.float64)
    assert torch.linalg.eigvalsh(curvature).tolist() == pytest.approx([0.0343, 1.1657], abs=1e-4)
    flagged = descent_matrix(curvature)
    assert torch.linalg.det(flagged).item() == pytest.approx(-0.0176, abs=1e-12)
    point = torch.linalg.eigh(flagged).eigenvectors[:, 0]
    moved = sketched_step(point, curvature.expand(2, 2, 2), torch.zeros(2, 2), torch.full_like(curvature, 2**0.5), 1e-3, 0)
    assert moved @ curvature @ moved > point @ curvature @ point
    cured, _ = with_unit_diagonal(curvature, point)
    assert torch.linalg.eigvalsh(descent_matrix(cured))[0] > 0


INPUTS, HIDDEN, CLASSES, REPLICAS, ROUND, RATE = 64, 128, 10, 4, 20, 0.3
SEEN = 1797
"""Points to learn from: as many as the digits have."""


def samples() -> tuple[Tensor, Tensor]:
    """Return points in ten classes, each class in three clouds that overlap with others; those behind `SEEN` are kept for the test."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES * 3, INPUTS, generator=generator)
    clouds = torch.randint(0, CLASSES * 3, (SEEN + 4000,), generator=generator)
    points = centres[clouds] + 1.15 * torch.randn(SEEN + 4000, INPUTS, generator=generator)
    return points, clouds % CLASSES


def normalised(hidden: Tensor) -> Tensor:
    """Normalise each neuron over the batch: that absorbs how many neurons there are before it."""
    return functional.batch_norm(hidden, None, None, training=True)


def logits(weights: Sequence[Tensor], points: Tensor) -> Tensor:
    hidden = functional.relu(normalised(points @ weights[0].T))
    hidden = functional.relu(normalised(hidden @ weights[1].T))
    return normalised(hidden @ weights[2].T)


def train(weights: Sequence[Tensor], points: Tensor, labels: Tensor, steps: int, seed: int) -> list[Tensor]:
    """Take plain gradient steps; return the weights they lead to."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(0, len(points), (64,), generator=generator)
        gradients = torch.autograd.grad(functional.cross_entropy(logits(weights, points[chosen]), labels[chosen]), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= RATE * gradient
    return [weight.detach() for weight in weights]


def cuts_of(turn: int, hidden: int = HIDDEN, replicas: int = REPLICAS) -> list[dict[int, list[Tensor]]]:
    first, second = (deal(hidden, [1] * replicas, SEED, turn, layer) for layer in range(2))
    return [{0: first}, {0: second, 1: first}, {1: second}]


def beginning() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (HIDDEN, INPUTS), (HIDDEN, HIDDEN), (CLASSES, HIDDEN)
    return [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]


def take_round(weights: list[Tensor], points: Tensor, labels: Tensor, turn: int) -> int:
    """Train the subnet of each replica on batches of its own and put all blocks back; return the bytes that the replicas sent."""
    cuts, sent = cuts_of(turn), 0
    for replica in range(REPLICAS):
        blocks = [own_block(weight, cut, replica) for weight, cut in zip(weights, cuts, strict=True)]
        data = Raw().pack(train(blocks, points, labels, ROUND, seed=100 * turn + replica))
        for weight, cut, block in zip(weights, cuts, Raw().unpack(data, blocks, replica), strict=True):
            put_block(weight, cut, replica, block)
        sent += len(data)
    return sent


def test_a_round_leaves_what_lies_between_the_subnets_alone():
    points, labels = samples()
    before, after = beginning(), beginning()
    take_round(after, points, labels, 0)
    changed = after[1] != before[1]
    first, second = cuts_of(0)[1][1], cuts_of(0)[1][0]
    for rows in range(REPLICAS):
        for columns in range(REPLICAS):
            assert changed[second[rows]][:, first[columns]].all() == (rows == columns)
            assert changed[second[rows]][:, first[columns]].any() == (rows == columns)
    assert changed.float().mean().item() == 1 / REPLICAS
    assert (after[0] != before[0]).all() and (after[2] != before[2]).all()


def test_subnets_learn_nearly_as_well_as_the_whole_network_for_less_traffic():
    """Measured: 98.4 % against 99.7 %; a smaller step does not close the gap, as the theory says."""
    points, labels = samples()
    seen, kept = slice(SEEN), slice(SEEN, None)

    def accuracy(weights: Sequence[Tensor]) -> float:
        return (logits(weights, points[kept]).argmax(1) == labels[kept]).float().mean().item()

    dense = train(beginning(), points[seen], labels[seen], 20 * ROUND, seed=0)
    weights = beginning()
    sent = sum(take_round(weights, points[seen], labels[seen], turn) for turn in range(20))
    whole = sum(weight.nbytes for weight in weights)
    assert accuracy(dense) > 0.98
    assert accuracy(weights) > accuracy(dense) - 0.02
    assert sent / (20 * REPLICAS * whole) == pytest.approx(traffic(INPUTS, HIDDEN, CLASSES, REPLICAS), rel=1e-12)


def traffic(inputs: int, hidden: int, outputs: int, replicas: int) -> float:
    """Return the part of a 3-layer network that one replica trains and sends."""
    own = inputs * hidden / replicas + (hidden / replicas) ** 2 + hidden / replicas * outputs
    return own / (inputs * hidden + hidden**2 + hidden * outputs)


@pytest.mark.parametrize("replicas, expected", [(2, 0.376), (4, 0.157), (8, 0.071)])
def test_the_traffic_of_the_published_network(replicas, expected):
    assert traffic(4096, 4096, 35, replicas) == pytest.approx(expected, abs=1e-3)
