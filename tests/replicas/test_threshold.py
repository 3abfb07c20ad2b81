"""Thresholded gradients (systems, section 2): nothing is lost, the largest values go first, it learns, its density is held."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional

from thinwire.bits.sparse import Sparse
from thinwire.config.options import options_from_spec
from thinwire.config.registry import EXCHANGES
from thinwire.config.sections import RunConfig
from thinwire.replicas.peers import Peers
from thinwire.replicas.threshold import HeldThreshold, ThresholdExchange, ThresholdExchangeOptions, choose_sent
from thinwire.testing.together import together

pytestmark = pytest.mark.usefixtures("brisk")
SHAPES = {"wide": (24, 32), "narrow": (160, 2), "small": (5, 5), "vector": (300,)}
LARGE = ("wide", "narrow")
REPLICAS, SAMPLES, SIZE, STEPS, RATE = 4, 64, 2000, 400, 2.6e-4


def gradients(replica: int, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def make(peers: Peers, like: dict[str, Tensor], **options) -> ThresholdExchange:
    return ThresholdExchange(ThresholdExchangeOptions(name="threshold", **options), RunConfig(), peers, like)


def alone(**options) -> ThresholdExchange:
    return together(1, lambda peers: make(peers, gradients(0, 0), **options))[0]


def train(peers: Peers, steps: int, dtype: torch.dtype = torch.float64, **options) -> tuple[ThresholdExchange, list[dict[str, Tensor]]]:
    """Exchange for some steps; return the method and what each step gave."""
    exchange, given = make(peers, gradients(0, 0, dtype), **options), []
    for step in range(steps):
        named = gradients(peers.index, step, dtype)
        exchange.gradients(named, step)
        exchange.commit()
        given.append(named)
    return exchange, given


def test_it_is_found_by_name_with_its_options():
    assert "threshold" in EXCHANGES.names()
    options = options_from_spec("exchange", "threshold:density=0.05,lifespan=7,feedback=false")
    assert EXCHANGES.load("threshold") is ThresholdExchange and options == ThresholdExchangeOptions(
        name="threshold", density=0.05, lifespan=7, feedback=False
    )
    assert alone().talks_before(0) and not alone().talks_after(0)


@pytest.mark.parametrize(
    "options", [{"density": 0.0}, {"density": 1.5}, {"density": math.nan}, {"lifespan": 0}, {"slack": 1.0}, {"warmup": -1}]
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ValueError, match=rf"exchange\.{next(iter(options))} is .*; choose"):
        ThresholdExchangeOptions(name="threshold", **options).check(RunConfig())
    ThresholdExchangeOptions(name="threshold").check(RunConfig())


def test_nothing_is_lost():
    """The sum of all gradients is the sum of all that was sent and the residual (criterion 1)."""
    results = together(4, lambda peers: train(peers, 40, density=0.02, lifespan=10))
    for name in LARGE:
        raw = sum(gradients(replica, step)[name] for replica in range(4) for step in range(40)) / 4
        sent = sum(named[name] for named in results[0][1])
        left = sum(exchange.state[f"residual/{name}"] for exchange, _ in results) / 4
        assert (raw - sent - left).abs().max() < 1e-12
        assert left.abs().max() > 1


@pytest.mark.parametrize("tied", [False, True])
def test_lifespan_of_one_step_is_topk(tied):
    """The same support as `torch.topk`, in every step and with ties (criterion 2)."""
    memory, residual, options = (
        HeldThreshold(torch.zeros(())),
        torch.zeros(30, 40),
        ThresholdExchangeOptions(name="threshold", lifespan=1, density=0.03),
    )
    for step in range(30):
        total = residual + torch.randn(30, 40, generator=torch.Generator().manual_seed(step))
        total = total.round() if tied else total
        mask, memory = choose_sent(total, memory, step, options)
        positions = total.flatten().abs().topk(36).indices
        assert torch.equal(mask.flatten().nonzero()[:, 0], positions.sort().values)
        residual = total.masked_fill(mask, 0)


def test_between_renewals_all_that_reaches_the_threshold_is_sent():
    total = torch.tensor([[3.0, -2.0, 1.0, 0.0], [math.nan, 1.9, -math.inf, 2.0]])
    mask, memory = choose_sent(total, HeldThreshold(torch.tensor(2.0), 99, 1), 100, ThresholdExchangeOptions(name="threshold", density=0.1))
    assert mask.tolist() == [[True, True, False, False], [True, False, True, True]]
    assert memory == HeldThreshold(torch.tensor(2.0), 99, 5)
    mask, _ = choose_sent(total, HeldThreshold(torch.tensor(0.0), 99, 1), 100, ThresholdExchangeOptions(name="threshold", density=0.1))
    assert mask.count_nonzero() == 7  # zeros never


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_a_threshold_whose_density_was_off_is_renewed_early(scale):
    def taken(slack):
        memory, options, found = (
            HeldThreshold(torch.zeros(())),
            ThresholdExchangeOptions(name="threshold", density=0.05, lifespan=50, slack=slack, feedback=False),
            [],
        )
        for step in range(500, 520):
            gradient = torch.randn(30, 40, generator=torch.Generator().manual_seed(step)) * (scale if step >= 510 else 1.0)
            _, memory = choose_sent(gradient, memory, step, options)
            found.append(memory.taken)
        return found

    assert taken(2.0) == [500] * 11 + [511] * 9
    assert taken(math.inf) == [500] * 20


@functools.cache
def problem() -> tuple[Tensor, Tensor]:
    """Return inputs [replica, sample, value] and labels of a logistic regression whose gradient is spread over all values."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    inputs = torch.randn(REPLICAS, SAMPLES, SIZE, generator=generator, dtype=torch.float64)
    chance = (5 * inputs @ weights / math.sqrt(SIZE)).sigmoid()
    return inputs, (torch.rand(REPLICAS, SAMPLES, generator=generator, dtype=torch.float64) < chance).double()


def slope(replica: int, weights: Tensor) -> Tensor:
    inputs, labels = (tensor[replica] for tensor in problem())
    return ((inputs @ weights).sigmoid() - labels) @ inputs / SAMPLES


def final_loss(weights: Tensor) -> float:
    inputs, labels = problem()
    scores = inputs @ weights
    return float((functional.softplus(scores) - labels * scores).mean())


@functools.cache
def descend(options: ThresholdExchangeOptions | None, steps: int = STEPS) -> tuple[float, list[float]]:
    """Learn with four replicas in a plain loop; return the final loss and the density of each step."""
    weights, densities = torch.zeros(SIZE, dtype=torch.float64), []
    residuals, memories = [torch.zeros_like(weights)] * REPLICAS, [HeldThreshold(torch.zeros(()))] * REPLICAS
    for step in range(steps):
        update, kept = torch.zeros_like(weights), 0
        for replica in range(REPLICAS):
            total = slope(replica, weights) + residuals[replica]
            if options is not None:
                mask, memories[replica] = choose_sent(total, memories[replica], step, options)
                residuals[replica] = total.masked_fill(mask, 0) if options.feedback else residuals[replica]
                total, kept = total.masked_fill(~mask, 0), kept + memories[replica].kept
            update += total
        weights = weights - RATE * update / REPLICAS
        densities.append(kept / REPLICAS / SIZE)
    return final_loss(weights), densities


def test_it_learns_as_well_as_all_gradients_but_not_without_feedback():
    """Criterion 3."""
    dense, _ = descend(None)
    with_feedback, _ = descend(ThresholdExchangeOptions(name="threshold", lifespan=10))
    without, _ = descend(ThresholdExchangeOptions(name="threshold", lifespan=10, feedback=False))
    assert dense == pytest.approx(0.525, abs=0.01)
    assert abs(with_feedback - dense) < 0.01
    assert without - dense > 0.1


def test_replicas_that_exchange_learn_as_the_plain_loop_does():
    steps = 120

    def task(peers):
        exchange, weights = make(peers, {"weights": torch.zeros(40, 50, dtype=torch.float64)}, lifespan=10), torch.zeros(40, 50).double()
        densities = []
        for step in range(steps):
            named = {"weights": slope(peers.index, weights.flatten()).view(40, 50)}
            exchange.gradients(named, step)
            exchange.commit()
            weights = weights - RATE * named["weights"]
            densities.append(exchange.figures["density"])
        return final_loss(weights.flatten()), densities

    results = together(REPLICAS, task)
    loss, densities = descend(ThresholdExchangeOptions(name="threshold", lifespan=10), steps)
    assert loss < 0.65  # from 0.693
    assert all(found == pytest.approx(loss, abs=1e-9) for found, _ in results)
    logged = [sum(step) / REPLICAS for step in zip(*(found for _, found in results), strict=True)]
    assert logged == pytest.approx(densities)


def test_density_is_held_where_a_first_threshold_would_overshoot():
    """A threshold from before the residual has filled misses the density by far; an early renewal does not (criterion 4)."""
    residual, tau, naive = torch.zeros(SIZE), torch.zeros(()), []
    memory, held, densities = HeldThreshold(torch.zeros(())), torch.zeros(SIZE), []
    for step in range(STEPS):
        gradient = torch.randn(SIZE, generator=torch.Generator().manual_seed(step))
        residual = residual + gradient
        if step % 100 == 0:
            tau = residual.abs().topk(20).values[-1]
        naive.append(float((residual.abs() >= tau).float().mean()))
        residual = residual.masked_fill(residual.abs() >= tau, 0)
        mask, memory = choose_sent(held + gradient, memory, step, ThresholdExchangeOptions(name="threshold", lifespan=100))
        held = (held + gradient).masked_fill(mask, 0)
        densities.append(memory.kept / SIZE)
    assert sum(naive) / STEPS > 0.04
    assert max(naive) > 0.1
    assert sum(densities) / STEPS == pytest.approx(0.01, rel=0.05)
    assert max(densities) < 0.02


@pytest.mark.parametrize("graph", ["complete", "ring"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_replicas_end_with_the_same_bits(graph, dtype):
    results = together(4, lambda peers: train(peers, 12, dtype, density=0.05), graph)
    for step in range(12):
        for name in SHAPES:
            gradient = results[0][1][step][name]
            assert gradient.dtype == dtype and gradient.any()
            assert all(torch.equal(given[step][name], gradient) for _, given in results)
            if name not in LARGE:
                exact = sum(gradients(replica, step, dtype)[name] for replica in range(4)) / 4
                torch.testing.assert_close(gradient, exact, rtol=1e-5, atol=1e-6)


def test_bytes_are_those_of_the_values_sent_and_of_the_rest_whole():
    def task(peers):
        exchange, named = make(peers, gradients(0, 0)), gradients(peers.index, 0)
        exchange.gradients(named, 0)
        packed = Sparse().pack([exchange._send(name, gradients(peers.index, 0)[name]) for name in LARGE])
        return peers.sent, len(packed), exchange.figures["density"]

    for sent, packed, density in together(2, task):
        # 8 of 768 values in two rows of 512, and 3 of 320: form, numbers of 10 or 9 bits, positions of 9 bits, values.
        assert packed == (1 + 3 + 9 + 8 * 8) + (1 + 2 + 4 + 3 * 8)
        assert density == pytest.approx(11 / 1088)
        assert sent == packed + (5 * 5 + 300) * 8  # two shots between two replicas: every value leaves once


def test_first_steps_travel_whole_where_asked():
    for exchange, given in together(2, lambda peers: train(peers, 3, warmup=2)):
        for step in range(2):
            for name, found in given[step].items():
                torch.testing.assert_close(found, (gradients(0, step)[name] + gradients(1, step)[name]) / 2)
        assert int(given[2]["wide"].count_nonzero()) <= 2 * 8 and int(exchange.state["steps"]) == 1  # 8 of each replica


def test_an_abandoned_step_leaves_no_trace():
    def task(peers):
        exchange, _ = train(peers, 5)
        before = {name: tensor.clone() for name, tensor in exchange.state.items()}
        once, again = gradients(peers.index, 5), gradients(peers.index, 5)
        exchange.gradients(once, 5)
        kept = all(torch.equal(exchange.state[name], tensor) for name, tensor in before.items()) and len(before) == len(exchange.state)
        exchange.gradients(again, 5)
        return kept and all(torch.equal(once[name], again[name]) for name in SHAPES)

    assert together(2, task) == [True, True]


def test_state_survives_a_checkpoint():
    def task(peers):
        whole, given = train(peers, 8, lifespan=3)
        first, _ = train(peers, 5, lifespan=3)
        exchange = make(peers, gradients(0, 0), lifespan=3)
        exchange.load_state(load(save(first.state)))
        for step in range(5, 8):
            named = gradients(peers.index, step)
            exchange.gradients(named, step)
            exchange.commit()
            assert all(torch.equal(named[name], given[step][name]) for name in SHAPES)
        return all(torch.equal(exchange.state[name], tensor) for name, tensor in whole.state.items())

    assert together(2, task) == [True, True]


def test_a_state_that_lacks_something_is_refused_by_name():
    exchange = alone()
    for name in exchange.state:
        with pytest.raises(ValueError, match=f"the checkpoint holds no {name}, which threshold needs"):
            exchange.load_state({other: tensor for other, tensor in exchange.state.items() if other != name})
    with pytest.raises(ValueError, match=r"residual/wide of shape \(3, 3\)"):
        exchange.load_state(exchange.state | {"residual/wide": torch.zeros(3, 3)})
    assert "residual/wide" not in alone(feedback=False).state
    with pytest.raises(ValueError, match="which threshold needs"):
        exchange.load_state({})


def test_a_gradient_that_is_not_finite_reaches_everyone():
    def task(peers):
        exchange, _ = train(peers, 3)
        named = gradients(peers.index, 3)
        named["wide"][1, 2] = math.nan if peers.index else 0.0
        exchange.gradients(named, 3)
        return bool(named["wide"].isnan().any())

    assert together(2, task) == [True, True]
