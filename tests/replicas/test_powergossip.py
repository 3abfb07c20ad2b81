"""The laws of low-rank gossip on a ring of eight (systems, section 3f), and that the method on threads is what was simulated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from thinwire.config.options import options_from_spec
from thinwire.config.sections import ReplicasConfig, RunConfig, TrainConfig
from thinwire.replicas.exchange import make_exchange
from thinwire.replicas.graph import Graph, make_graph
from thinwire.replicas.powergossip import PowerGossip, directions_drawn, goes_forward, orthonormal, part, product
from thinwire.testing.together import together

RING = make_graph("ring", 8)
SHARE = 1 / 3
CONFIG = RunConfig(
    seed=5,
    train=TrainConfig(steps=1000),
    replicas=ReplicasConfig(count=8, graph="ring"),
    exchange=options_from_spec("exchange", "powergossip:iterations=1"),
)


def start(seed: int, size: int, trials: int = 1, replicas: int = 8) -> Tensor:
    """Return a matrix for every replica and trial, [R, trials, m, m]."""
    return torch.randn(replicas, trials, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def error(matrices: Tensor) -> Tensor:
    """Return each trial's squared distance of the replicas from their mean."""
    return (matrices - matrices.mean(0)).square().sum((0, 2, 3))


def draw_trials(edge: tuple[int, int], name: str, iteration: int, matrices: Tensor, rank: int) -> Tensor:
    _, trials, rows, columns = matrices.shape
    return torch.stack([directions_drawn(trial, edge, name, iteration, (rows, columns), rank) for trial in range(trials)]).to(matrices)


def iterate(
    matrices: Tensor, directions: dict, iteration: int, rank: int = 1, warm: bool = True, name: str = "x", graph: Graph = RING
) -> Tensor:
    """Take one iteration on every edge at once, with the functions that the method uses; directions are changed in place."""
    moved, forward = matrices.clone(), goes_forward(iteration)
    for low, high in graph.weights:
        drawn = partial(draw_trials, (low, high), name, iteration, matrices, rank)
        known = directions.get((low, high)) if warm else None
        basis = orthonormal(drawn() if known is None else known, drawn)
        difference = product(matrices[high], basis, forward) - product(matrices[low], basis, forward)
        directions[low, high] = difference
        moved[high] -= graph.weight(low, high) * part(difference, basis, forward)
        moved[low] += graph.weight(low, high) * part(difference, basis, forward)
    return moved


def gossip(matrices: Tensor, steps: int, **options) -> tuple[Tensor, Tensor]:
    """Return where so many iterations lead, and the errors on the way relative to the first, [steps + 1, trials]."""
    directions: dict = {}
    errors = [error(matrices)]
    for iteration in range(steps):
        matrices = iterate(matrices, directions, iteration, **options)
        errors.append(error(matrices))
    return matrices, torch.stack(errors) / errors[0]


@pytest.mark.parametrize("warm", [True, False])
def test_the_mean_stays_and_the_distance_never_grows(warm):
    matrices = start(0, 8)
    moved, errors = gossip(matrices, 600, warm=warm)
    assert (moved.mean(0) - matrices.mean(0)).abs().max() < 1e-12
    assert errors[-1] < 1e-6
    assert (errors[1:] <= errors[:-1]).all()


def test_one_step_with_a_random_direction_follows_the_law():
    """E[error after / error before] = 1 - 1.016 / m + 0.254 / m^2, which any wrong sign, weight or length would miss."""
    _, errors = gossip(start(1, 32, trials=200), 1)
    assert pytest.approx(0.9685, abs=1e-4) == 1 - 1.016 / 32 + 0.254 / 32**2
    assert errors[1].mean().item() == pytest.approx(0.9685, abs=1.5e-3)


@pytest.mark.parametrize("size, at_100, at_300", [(16, 1.1e-2, 3.8e-5), (32, 6.0e-2, 2.6e-3)])
def test_convergence_is_as_fast_as_measured_before(size, at_100, at_300):
    _, errors = gossip(start(2, size, trials=4), 300)
    for step, expected in ((100, at_100), (300, at_300)):
        assert expected / 2 < errors[step].mean().item() < 2 * expected


@pytest.mark.parametrize("size, steps", [(16, 250), (32, 450)])
def test_keeping_directions_pays(size, steps):
    needed = []
    for warm in (True, False):
        _, errors = gossip(start(3, size, trials=4), steps, warm=warm)
        needed.append((errors.mean(1) > 1e-2).sum().item())
    assert needed[1] < steps
    assert needed[0] <= 0.8 * needed[1]


@pytest.mark.parametrize("warm", [True, False])
def test_full_rank_is_plain_gossip(warm):
    """The slowest of its errors shrinks by the square of the second eigenvalue of the ring's weights."""
    matrices = start(4, 6)
    moved, errors = gossip(matrices, 60, rank=6, warm=warm)
    second = (1 + 2 * torch.cos(torch.tensor(2 * torch.pi / 8, dtype=torch.float64))) / 3
    assert (errors[-1] / errors[-2]).item() == pytest.approx(0.6476, abs=2e-4)
    assert second.item() ** 2 == pytest.approx(0.6476, abs=1e-4)
    weights = torch.eye(8, dtype=torch.float64) * SHARE
    for low, high in RING.weights:
        weights[low, high] = weights[high, low] = SHARE
    torch.testing.assert_close(moved, torch.tensordot(torch.linalg.matrix_power(weights, 60), matrices, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_replicas_stay_equal_and_learn_of_a_later_difference(rank, dtype):
    """A product of nothing is nothing; kept as it is, it would hide all later differences."""
    matrices = start(5, 8, replicas=2).to(dtype)
    matrices[1] = matrices[0]
    pair, directions = make_graph("complete", 2), {}
    for iteration in range(4):
        assert torch.equal(iterate(matrices, directions, iteration, rank, graph=pair), matrices)
    matrices[1] += 1
    for iteration in range(4, 40):
        matrices = iterate(matrices, directions, iteration, rank, graph=pair)
    assert matrices.isfinite().all()
    torch.testing.assert_close(matrices[0], matrices[1], rtol=0, atol=1e-5)


def test_directions_that_depend_on_each_other_become_orthonormal():
    column = torch.randn(9, 1, generator=torch.Generator().manual_seed(0))
    basis = orthonormal(torch.cat((column, 2 * column, torch.zeros(9, 1)), dim=1), lambda: torch.randn(9, 3))
    torch.testing.assert_close(basis.T @ basis, torch.eye(3), rtol=0, atol=1e-6)


def parameters_of(replica: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    shapes = {"wide": (6, 9), "gains": (5,), "tall": (7, 2)}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def run(method: PowerGossip, named: dict[str, Tensor], steps: range) -> dict[str, Tensor]:
    """Take the steps of a trainer, with an update that differs between replicas and steps."""
    for step in steps:
        for tensor in named.values():
            tensor.add_(torch.sin(torch.arange(tensor.numel()).to(tensor) * (step + 1) + method.peers.index).view(tensor.shape), alpha=0.01)
        method.commit()
        method.parameters(named, None, step)
        method.commit()
    return named


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("warm", [True, False])
def test_the_method_on_threads_is_the_simulation(rank, warm):
    spec = f"powergossip:iterations=3,rank={rank},warm={str(warm).lower()}"
    config = replace(CONFIG, seed=0, exchange=options_from_spec("exchange", spec))

    def task(peers):
        named = parameters_of(peers.index)
        method = make_exchange(config, peers, named)
        for step in range(2):
            method.parameters(named, None, step)
            method.commit()
        return named, peers.sent

    results = together(8, task, "ring")
    for name in ("wide", "tall"):
        begun = torch.stack([parameters_of(replica)[name] for replica in range(8)])[:, None]
        moved, _ = gossip(begun, 6, rank=rank, warm=warm, name=name)
        for replica in range(8):
            torch.testing.assert_close(results[replica][0][name], moved[replica, 0], rtol=0, atol=1e-12)
    # Both ends of eight edges: per iteration r (m or n) numbers a matrix, and the vector once a step.
    forward, back = rank * 6 + min(rank, 2) * 7, rank * 9 + min(rank, 2) * 2
    assert sum(sent for _, sent in results) == 2 * 8 * 8 * (3 * forward + 3 * back + 2 * 5)


@pytest.mark.parametrize("warm", ["true", "false"])
def test_a_run_continues_from_its_state_bit_for_bit_and_ends_with_one_model(warm):
    config = replace(CONFIG, train=TrainConfig(steps=7), exchange=options_from_spec("exchange", f"powergossip:iterations=3,warm={warm}"))

    def whole(peers):
        named = parameters_of(peers.index, torch.float32)
        return run(make_exchange(config, peers, named), named, range(7))

    def broken(peers):
        named = parameters_of(peers.index, torch.float32)
        method = make_exchange(config, peers, named)
        run(method, named, range(4))
        again = make_exchange(config, peers, named)
        again.load_state(method.state)
        return run(again, named, range(4, 7))

    undisturbed, resumed = together(8, whole, "ring"), together(8, broken, "ring")
    for one, other in zip(undisturbed, resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(torch.equal(one[name], undisturbed[0][name]) for name in one)


def test_both_ends_of_an_edge_hold_the_same_directions():
    def task(peers):
        named = parameters_of(peers.index, torch.float32)
        method = make_exchange(CONFIG, peers, named)
        run(method, named, range(3))
        return method.state, method.figures

    results = together(8, task, "ring")
    for low, high in RING.weights:
        for name in ("wide", "tall"):
            label = f"direction.{low}-{high}/{name}"
            assert torch.equal(results[low][0][label], results[high][0][label])
    assert all(figures["distance"] > 0 for _, figures in results)


def test_a_moved_basis_turns_the_directions_that_lie_in_coordinates():
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q

    def task(peers):
        named = parameters_of(peers.index)
        method = make_exchange(CONFIG, peers, named)
        run(method, named, range(1))
        before = {name: tensor.clone() for name, tensor in method.state.items()}
        method.carry_over(rotation, {"wide": 0})
        return before, method.state

    before, after = together(2, task, "complete")[0]
    torch.testing.assert_close(after["direction.0-1/wide"], rotation @ before["direction.0-1/wide"])
    assert torch.equal(after["direction.0-1/tall"], before["direction.0-1/tall"])


def test_options_and_a_state_with_gaps_are_refused():
    for spec, word in (("powergossip:rank=0", "rank is 0"), ("powergossip:iterations=0", "iterations is 0")):
        with pytest.raises(ValueError, match=word):
            options_from_spec("exchange", spec).check(CONFIG)

    other = replace(CONFIG, exchange=options_from_spec("exchange", "powergossip:iterations=1,rank=2"))

    def task(peers):
        method = make_exchange(CONFIG, peers, parameters_of(peers.index))
        with pytest.raises(ValueError, match="holds no counter, which powergossip needs"):
            method.load_state({"anchor/wide": torch.zeros(6, 9)})
        run(method, parameters_of(peers.index), range(1))
        without = {name: tensor for name, tensor in method.state.items() if "tall" not in name}
        with pytest.raises(ValueError, match=r"holds no direction\.0-1/tall"):
            method.load_state(without)
        with pytest.raises(ValueError, match=r"wide of shape \(6, 1\) where powergossip needs \(6, 2\)"):
            make_exchange(other, peers, parameters_of(peers.index)).load_state(method.state)

    together(2, task)
