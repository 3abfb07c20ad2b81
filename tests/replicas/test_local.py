"""Local steps with an outer Nesterov step: by hand, to the bit on all replicas, and through a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.config.options import options_from_spec
from thinwire.config.sections import ReplicasConfig, RunConfig, TrainConfig
from thinwire.replicas.exchange import make_exchange
from thinwire.replicas.local import Local
from thinwire.testing.together import together

SHAPES = {"matrix": (6, 9), "gains": (5,), "table": (11, 4)}


def configured(spec: str, steps: int, count: int = 3, graph: str = "complete") -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=steps), replicas=ReplicasConfig(count=count, graph=graph), exchange=options_from_spec("exchange", spec)
    )


def beginning(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def update(tensor: Tensor, step: int, replica: int) -> Tensor:
    """Return what an optimizer would add: other numbers on every replica and at every step."""
    return torch.cos(torch.arange(tensor.numel()).to(tensor) * (step + 2) + replica).view(tensor.shape) * 0.05


def run(method: Local, named: dict[str, Tensor], steps: range) -> dict[str, Tensor]:
    """Take the steps of a trainer."""
    for step in steps:
        method.gradients({name: torch.ones_like(tensor) for name, tensor in named.items()}, step)
        for tensor in named.values():
            tensor.add_(update(tensor, step, method.peers.index))
        method.commit()
        method.parameters(named, None, step)
        method.commit()
    return named


def trained(config: RunConfig, steps: int, dtype: torch.dtype = torch.float64) -> list[tuple[dict[str, Tensor], Local]]:
    def task(peers):
        named = beginning(dtype)
        method = make_exchange(config, peers, named)
        return run(method, named, range(steps)), method

    return together(config.replicas.count, task, config.replicas.graph)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_meeting_every_step_with_rate_one_and_no_momentum_is_averaging(dtype, error):
    results = trained(configured("local:steps=1,rate=1.0,momentum=0.0,packing=fp32", 100), 7, dtype)
    for name, start in beginning(dtype).items():
        expected = start + sum(update(start, step, replica) for step in range(7) for replica in range(3)) / 3
        for named, _ in results:
            torch.testing.assert_close(named[name], expected, rtol=0, atol=error)


def test_meetings_are_nesterov_steps_along_the_mean_change():
    """Three meetings after two steps each, against torch's own Nesterov with the mean change as gradient."""
    results = trained(configured("local:steps=2,rate=0.7,momentum=0.9,packing=fp32", 100), 6)
    for name, start in beginning(torch.float64).items():
        anchor = torch.nn.Parameter(start.clone())
        outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
        for meeting in range(3):
            steps = range(2 * meeting, 2 * meeting + 2)
            anchor.grad = -sum(update(start, step, replica) for step in steps for replica in range(3)) / 3
            outer.step()
        for named, _ in results:
            torch.testing.assert_close(named[name], anchor.data, rtol=0, atol=1e-14)


@pytest.mark.parametrize("packing", ["fp32", "int8"])
@pytest.mark.parametrize("graph", ["complete", "ring"])
def test_replicas_are_the_same_to_the_bit_after_a_meeting(packing, graph):
    config = configured(f"local:steps=3,momentum=0.5,packing={packing}", 8, count=4, graph=graph)
    for steps, same in ((3, True), (4, False), (6, True), (8, True)):  # the eighth is the last of the run
        results = trained(config, steps, torch.float32)
        for name in SHAPES:
            assert all(torch.equal(named[name], results[0][0][name]) for named, _ in results) == same
            for label in ("anchor", "momentum"):
                assert all(torch.equal(method.state[f"{label}/{name}"], results[0][1].state[f"{label}/{name}"]) for _, method in results)
        if same:
            assert torch.equal(results[0][1].state["anchor/matrix"], results[0][0]["matrix"])
            assert 0 < results[0][1].figures["agreement"] <= 1.01


def test_gradients_are_averaged_in_warm_up_and_replicas_part_from_there():
    spec = "local:steps=2,rate=1.0,momentum=0.0,packing=fp32,warmup=3"

    def task(peers):
        named = beginning(torch.float64)
        method = make_exchange(configured(spec, 7), peers, named)
        for step in range(7):
            gradients = {name: update(tensor, step, peers.index) for name, tensor in named.items()}
            method.gradients(gradients, step)
            for name, tensor in named.items():
                tensor.add_(gradients[name])
            method.commit()
            if step == 2:
                start = {name: tensor.clone() for name, tensor in named.items()}
            if step == 3:  # from here to the meeting two updates of its own, of which the first is in `named` already
                assert all(torch.equal(method.state[f"anchor/{name}"], start[name]) for name in start)
            method.parameters(named, None, step)
            method.commit()
        meetings = [step for step in range(7) if method.talks_after(step)]
        return named, [step for step in range(7) if method.talks_before(step)], meetings

    results = together(3, task)
    for name, start in beginning(torch.float64).items():
        expected = start + sum(update(start, step, replica) for step in range(7) for replica in range(3)) / 3
        for named, before, after in results:
            torch.testing.assert_close(named[name], expected, rtol=0, atol=1e-14)
            assert before == [0, 1, 2] and after == [3, 5, 6]


def test_int8_stays_close_to_exact_numbers_and_sends_a_quarter():
    exact, packed = (
        trained(configured(f"local:steps=2,momentum=0.5,packing={packing}", 100), 6, torch.float32) for packing in ("fp32", "int8")
    )
    start = beginning(torch.float32)["matrix"]
    moved = (exact[0][0]["matrix"] - start).norm()
    assert (packed[0][0]["matrix"] - exact[0][0]["matrix"]).norm() < 0.02 * moved
    assert packed[0][1].peers.sent < 0.6 * exact[0][1].peers.sent  # short rows: their scales weigh more than in a model


@pytest.mark.parametrize("stop", [1, 3, 4, 5])
def test_a_run_continues_from_its_state_bit_for_bit(stop):
    """Before the first meeting, at one, and between two."""
    config = configured("local:steps=2,momentum=0.5,packing=fp32", 9)

    def broken(peers):
        named = beginning(torch.float32)
        method = make_exchange(config, peers, named)
        run(method, named, range(stop))
        fresh = {name: torch.full_like(tensor, 7) for name, tensor in named.items()}
        again = make_exchange(config, peers, fresh)  # made before the checkpoint is read, as a trainer does
        for name, tensor in fresh.items():
            tensor.copy_(named[name])
        again.load_state(method.state)
        return run(again, fresh, range(stop, 9))

    for (whole, _), resumed in zip(trained(config, 9, torch.float32), together(3, broken), strict=True):
        assert all(torch.equal(whole[name], resumed[name]) for name in SHAPES)


def test_a_step_that_is_not_committed_leaves_no_trace():
    config = configured("local:steps=2,momentum=0.5,packing=fp32", 9, count=2)

    def task(peers):
        named = beginning(torch.float64)
        method = make_exchange(config, peers, named)
        method.gradients({}, 0)
        assert not method.state
        run(method, named, range(1))
        before = dict(method.state)
        method.parameters(named, None, 1)
        return all(method.state[name] is tensor for name, tensor in before.items())

    assert together(2, task) == [True, True]


def test_a_moved_basis_turns_anchor_and_momentum():
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    _, method = trained(configured("local:steps=2,momentum=0.5,packing=fp32", 9), 3)[0]
    before = {name: tensor.clone() for name, tensor in method.state.items()}
    method.carry_over(rotation, {"matrix": 0})
    for label in ("anchor", "momentum"):
        torch.testing.assert_close(method.state[f"{label}/matrix"], rotation @ before[f"{label}/matrix"])
        assert torch.equal(method.state[f"{label}/table"], before[f"{label}/table"])


def test_when_replicas_meet():
    (_, method), *_ = trained(configured("local:steps=3", 8), 1)
    assert [step for step in range(8) if method.meets(step)] == [2, 5, 7]


@pytest.mark.parametrize(
    "spec, word",
    [
        ("local:steps=0", "steps is 0"),
        ("local:rate=0.0", "rate is 0.0"),
        ("local:momentum=1.0", "momentum is 1.0"),
        ("local:packing=x", "x"),
        ("local:warmup=-1", "warmup is -1"),
    ],
)
def test_bad_options_are_refused(spec, word):
    with pytest.raises(ValueError, match=word):
        configured(spec, 5).exchange.check(configured(spec, 5))


def test_a_state_with_gaps_is_refused():
    _, method = trained(configured("local:steps=2", 9), 3)[0]
    with pytest.raises(ValueError, match="holds no momentum/gains, which local needs"):
        method.load_state({name: tensor for name, tensor in method.state.items() if name != "momentum/gains"})
