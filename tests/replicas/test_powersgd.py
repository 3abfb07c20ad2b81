"""PowerSGD: torch's own hook as referee, nothing lost for good, the same bits everywhere, exact bytes, state that survives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from patience import HANG
from replicas import referee
from thinwire.config.options import options_from_spec
from thinwire.config.sections import ModelConfig, ReplicasConfig, RunConfig
from thinwire.replicas.exchange import make_exchange
from thinwire.replicas.peers import Peers
from thinwire.replicas.powersgd import PowerSGD, added, gram_schmidt, outer_sum
from thinwire.testing.together import together

Script = Callable[[int, int], dict[str, torch.Tensor]]


def config_of(rank: int, count: int = 2, seed: int = 0) -> RunConfig:
    return RunConfig(seed=seed, replicas=ReplicasConfig(count=count), exchange=options_from_spec("exchange", f"powersgd:rank={rank}"))


def exchange_of(peers: Peers, rank: int, like: dict[str, torch.Tensor], seed: int = 0) -> PowerSGD:
    method = make_exchange(config_of(rank, max(peers.count, 2), seed), peers, like)
    assert isinstance(method, PowerSGD)
    return method


def walk(method: PowerSGD, script: Script, steps: range) -> list[dict[str, torch.Tensor]]:
    """Take a method through gradients; return what it makes of them."""
    found = []
    for step in steps:
        named = {name: gradient.clone() for name, gradient in script(step, method.peers.index).items()}
        method.gradients(named, step)
        method.commit()
        found.append(named)
    return found


def random_script(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Script:
    def script(step: int, replica: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + replica)
        return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}

    return script


@pytest.fixture(scope="module")
def verdict(tmp_path_factory) -> dict[int, dict]:
    """Return what torch's hook makes of the script on its first worker, by rank."""
    out = str(tmp_path_factory.mktemp("referee") / "found")
    subprocess.run([sys.executable, str(Path(referee.__file__)), out, "1", "2", "4"], check=True, timeout=HANG)
    first, second = (torch.load(f"{out}.{worker}") for worker in range(referee.WORKERS))
    assert all(
        torch.equal(tensor, second[rank]["steps"][step][name])
        for rank, found in first.items()
        for step, named in enumerate(found["steps"])
        for name, tensor in named.items()
    )
    return first


def largest_difference(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for one, other in zip(found, wanted, strict=True) for name in other)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_torch_finds_the_same(verdict, rank):
    """From the same first factors and the same gradients, of a size of about 2, all steps agree; without feedback they do not."""
    steps = range(referee.PLAIN_STEPS, referee.PLAIN_STEPS + referee.STEPS)

    def task(peers, feedback=True):
        like = referee.scripted(0, 0)
        method = exchange_of(peers, rank, like)
        factors = referee.first_factors(verdict[rank]["order"], rank)
        assert set(factors) == set(method.forms)
        method.load_state(
            {f"factor/{name}": factor for name, factor in factors.items()}
            | {f"residual/{name}": torch.zeros_like(like[name]) for name in factors}
        )
        if not feedback:
            method.propose = lambda name, tensor: None if name.startswith("residual") else PowerSGD.propose(method, name, tensor)
        return walk(method, referee.scripted, steps)

    for found in together(2, task):
        assert largest_difference(found, verdict[rank]["steps"]) < 1e-10
    assert largest_difference(together(2, lambda peers: task(peers, feedback=False))[0], verdict[rank]["steps"]) > 0.1


@pytest.mark.parametrize("graph, count", [("complete", 3), ("0-1,1-2", 3)])
def test_nothing_is_lost_for_good(graph, count):
    """Over all steps the mean gradient is what was applied and the mean of what the replicas still hold."""
    shapes = {"matrix": (20, 15), "cube": (9, 4, 5), "vector": (7,), "square": (2, 2)}
    script, steps = random_script(shapes, torch.float64), range(12)

    def task(peers):
        method = exchange_of(peers, 2, script(0, 0))
        return walk(method, script, steps), method.state, method.figures

    results = together(count, task, graph)
    for name in shapes:
        given = sum(script(step, replica)[name] for step in steps for replica in range(count)) / count
        applied = sum(found[name] for found in results[0][0])
        kept = sum(state[f"residual/{name}"] if name in ("matrix", "cube") else torch.zeros(()) for _, state, _ in results) / count
        torch.testing.assert_close(given, applied + kept, rtol=0, atol=1e-12)
    for found, state, figures in results:
        assert all(torch.equal(tensor, results[0][0][step][name]) for step in steps for name, tensor in found[step].items())
        assert set(state) == {f"{label}/{name}" for label in ("factor", "residual") for name in ("matrix", "cube")}
        assert torch.equal(state["factor/cube"], results[0][1]["factor/cube"])
        assert state["residual/cube"].shape == (9, 4, 5)
        assert 0.1 < figures["residual"] < 1


def test_vectors_and_small_matrices_are_exact():
    shapes = {"vector": (7,), "square": (4, 4), "thin": (100, 2)}
    script = random_script(shapes, torch.float64)
    (found,), _ = together(2, lambda peers: walk(exchange_of(peers, 2, script(0, 0)), script, range(1)))
    for name in shapes:
        torch.testing.assert_close(found[name], (script(0, 0)[name] + script(0, 1)[name]) / 2)


def test_a_matrix_of_that_rank_is_found_at_once_and_a_constant_one_in_time():
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(30, 3, generator=generator) @ torch.randn(3, 20, generator=generator)
    full = torch.randn(30, 20, generator=generator)

    def task(peers, matrix):
        return walk(exchange_of(peers, 3, {"m": matrix}), lambda step, replica: {"m": matrix * (1 + replica)}, range(40))

    found = together(2, lambda peers: task(peers, low))[0]
    torch.testing.assert_close(found[0]["m"], low * 1.5, rtol=1e-4, atol=1e-4)
    applied = sum(step["m"] for step in together(2, lambda peers: task(peers, full))[0]) / 40
    assert (applied - full * 1.5).norm() < 0.2 * full.norm()


def test_warm_start_pays():
    """On a constant matrix without feedback the error falls to that of the best approximation of the rank."""
    matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def task(peers):
        method = exchange_of(peers, 4, {"m": matrix})
        method.propose = lambda name, tensor: PowerSGD.propose(method, name, tensor if name.startswith("factor") else tensor * 0)
        return [float((found["m"] - matrix).norm()) for found in walk(method, lambda *_: {"m": matrix}, range(60))]

    errors = together(2, task)[0]
    best = float(torch.linalg.svdvals(matrix)[4:].norm())
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.005 * best


def test_bytes_are_those_of_the_factors():
    """Both means are of two shots, which send 2 (R - 1) / R of what they average."""
    script = random_script({"m": (64, 32), "v": (8,)})

    def task(peers):
        walk(exchange_of(peers, 2, script(0, 0)), script, range(1))
        return peers.sent

    sent = together(4, task)
    factors = 2 * 3 * 2 * (64 + 32) * 4 // 4
    assert sent == [factors + 8 * 4, factors + 8 * 4, factors + 8 * 4, factors + 3 * 8 * 4]  # a vector is added up by the last replica


def test_gradients_of_zeros_are_left_behind():
    """A parameter without a gradient for some steps is learnt as soon as it has one, even where its first rows and columns stay zero."""
    later = torch.zeros(12, 10)
    later[6:, 5:] = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))

    def task(peers):
        return walk(exchange_of(peers, 5, {"m": later}), lambda step, replica: {"m": later if step > 2 else later * 0}, range(6))

    found = together(2, task)[0]
    assert all(torch.equal(found[step]["m"], later * 0) for step in range(3))
    torch.testing.assert_close(found[3]["m"], later, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    spoiled = torch.ones(12, 10)
    spoiled[3, 4] = value
    found = together(2, lambda peers: walk(exchange_of(peers, 2, {"m": spoiled}), lambda *_: {"m": spoiled}, range(1)))
    assert not found[0][0]["m"].isfinite().all()


def test_a_run_goes_on_from_its_state_as_if_it_had_not_stopped():
    shapes = {"matrix": (20, 15), "vector": (7,)}
    script = random_script(shapes)

    def task(peers):
        method = exchange_of(peers, 2, script(0, 0))
        walk(method, script, range(3))
        saved = {name: tensor.clone() for name, tensor in method.state.items()}
        method.gradients(script(99, peers.index), 3)  # abandoned: never committed
        again = exchange_of(peers, 2, script(0, 0))
        again.load_state(saved)
        method.load_state(method.state)
        return walk(method, script, range(3, 6)), walk(again, script, range(3, 6))

    for on, again in together(2, task):
        assert all(torch.equal(one[name], other[name]) for one, other in zip(on, again, strict=True) for name in shapes)


def test_a_state_with_gaps_is_refused():
    like = {"matrix": torch.zeros(20, 15), "vector": torch.zeros(7)}
    full = {"factor/matrix": torch.zeros(15, 2), "residual/matrix": torch.zeros(20, 15)}

    def task(peers):
        method = exchange_of(peers, 2, like)
        with pytest.raises(ValueError, match="the checkpoint holds no factor/matrix"):
            method.load_state({})
        method.load_state(full)
        with pytest.raises(ValueError, match="the checkpoint holds no residual/matrix, which powersgd needs to go on; resume with"):
            method.load_state({"factor/matrix": torch.zeros(15, 2)})
        with pytest.raises(ValueError, match=r"factor/matrix of shape \(15, 3\) where powersgd needs \(15, 2\); resume with the options"):
            method.load_state(full | {"factor/matrix": torch.zeros(15, 3)})

    together(2, task)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_moved_basis_is_followed(axis):
    """Turning gradients and state gives the turned result."""
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64))[0]
    script = random_script({"m": (16, 16)}, torch.float64)

    def turned(matrix: torch.Tensor) -> torch.Tensor:
        return rotation @ matrix if axis == 0 else matrix @ rotation.T

    def task(peers):
        still, moved = (exchange_of(peers, 2, script(0, 0)) for _ in range(2))
        for method in (still, moved):
            walk(method, script, range(3))
        moved.carry_over(rotation, {"m": axis})
        return walk(still, script, range(3, 5)), walk(moved, lambda *at: {"m": turned(script(*at)["m"])}, range(3, 5))

    for still, moved in together(2, task):
        for one, other in zip(still, moved, strict=True):
            torch.testing.assert_close(turned(one["m"]), other["m"], rtol=0, atol=1e-10)


def test_the_seed_and_the_name_choose_the_first_factor():
    script = random_script({"a": (20, 15), "b": (20, 15)})

    def task(peers, seed):
        first = walk(exchange_of(peers, 1, script(0, 0), seed), lambda *at: dict.fromkeys("ab", script(*at)["a"]), range(1))[0]
        return first["a"], first["b"]

    (a, b), (other, _) = (together(2, lambda peers, seed=seed: task(peers, seed))[0] for seed in (0, 1))
    assert not torch.allclose(a, b)
    assert not torch.allclose(a, other)


@pytest.mark.parametrize("dtype, exact", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_columns_become_orthonormal(dtype, exact):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(50, 6, generator=generator, dtype=dtype) * torch.logspace(0, -30, 6, dtype=dtype)
    matrix[:, 3] = matrix[:, 0] * 2 + torch.randn(50, generator=generator, dtype=dtype) * 1e-6
    found = gram_schmidt(matrix)
    assert (found.T.double() @ found.double() - torch.eye(6)).abs().max() < exact
    assert (found - found @ (found.T @ found)).abs().max() < 10 * exact
    matrix[:, 4] = matrix[:, 0]
    assert torch.equal(gram_schmidt(matrix)[:, 4], torch.zeros(50, dtype=dtype))


def test_sums_and_products_are_right():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(700, 3, generator=generator), torch.randn(401, 3, generator=generator)
    torch.testing.assert_close(outer_sum(left, right), left @ right.T)
    for count in (1, 2, 3, 1000):
        rows = torch.randn(4, count, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(added(rows), rows.sum(-1, keepdim=True))


@pytest.mark.parametrize("rank", [0, -1, 256, 1000])
def test_ranks_that_gain_nothing_are_refused(rank):
    config = RunConfig(
        model=ModelConfig(width=256), replicas=ReplicasConfig(count=2), exchange=options_from_spec("exchange", f"powersgd:rank={rank}")
    )
    with pytest.raises(ValueError, match=f"exchange.rank is {rank}; .* width 256 .* 1 to 255; choose one such as 4"):
        together(2, lambda peers: make_exchange(config, peers, {}))


def test_first_steps_travel_whole_where_asked():
    config = RunConfig(replicas=ReplicasConfig(count=2), exchange=options_from_spec("exchange", "powersgd:rank=2,warmup=1"))
    gradients = [{"matrix": torch.randn(20, 15, generator=torch.Generator().manual_seed(replica))} for replica in range(2)]

    def task(peers):
        method = make_exchange(config, peers, {"matrix": torch.zeros(20, 15)})
        found = []
        for step in range(2):
            named = {"matrix": gradients[peers.index]["matrix"].clone()}
            method.gradients(named, step)
            method.commit()
            found.append(named["matrix"])
        return found

    exact = (gradients[0]["matrix"] + gradients[1]["matrix"]) / 2
    for first, second in together(2, task):
        torch.testing.assert_close(first, exact)
        assert torch.linalg.matrix_rank(second) == 2
