"""The adaptive factor (systems, section 4): its controller on scripted gains, what gains are, that nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from thinwire.bits.sparse import Sparse
from thinwire.config.options import options_from_spec
from thinwire.config.registry import EXCHANGES
from thinwire.config.sections import RunConfig
from thinwire.replicas.gravac import COMPRESSORS, Controller, GraVAC, GraVACOptions, Rules, anywhere, ladder, saturated, top
from thinwire.replicas.peers import Peers
from thinwire.testing.together import together

pytestmark = pytest.mark.usefixtures("brisk")
SHAPES = {"wide": (24, 32), "narrow": (160, 2), "small": (5, 5), "vector": (300,)}
LARGE = ("wide", "narrow")
SCRIPT = {1.0: 1.0, 10.0: 0.95, 20.0: 0.94, 40.0: 0.80, 160.0: 0.60, 1000.0: 0.30}
WINDOW = 5


def scripted(**changes) -> Controller:
    rules = {"factors": ladder(10.0, 1000.0, "exponential"), "gain": 0.7, "omega": 0.01, "window": WINDOW, "saturation": False}
    return Controller(Rules(**rules | changes))


def drive(controller: Controller, gains: Mapping[float, float], iterations: int, cost: float = 1.0) -> list[float]:
    """Let a controller see the gains of a script; return the factors it sends."""
    sent, factors = [], controller.rules.factors
    for _ in range(iterations):
        sent.append(controller.choose(gains[factors[controller.minimum]], gains[factors[controller.candidate]]))
        controller.finish(cost)
    return sent


def test_policies_are_the_published_ones():
    assert ladder(10.0, 1000.0, "exponential") == (1.0, 10.0, 20.0, 40.0, 160.0, 1000.0)
    assert ladder(10.0, 2000.0, "geometric") == (1.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2000.0)
    assert ladder(3.0, 3.0, "geometric") == (1.0, 3.0)


def test_the_controller_follows_its_script():
    """Criterion 4: a candidate is tried for a window; too little gain falls back to the minimum, and further to everything, at once."""
    controller = scripted()
    assert drive(controller, SCRIPT, 4 * WINDOW) == [20.0] * WINDOW + [40.0] * WINDOW + [10.0] * 2 * WINDOW
    assert controller.rules.factors[controller.minimum] == 10.0
    assert drive(controller, SCRIPT, 2) == [10.0] * 2
    assert drive(controller, dict.fromkeys(SCRIPT, 0.5), 1) == [1.0]
    assert drive(controller, SCRIPT, 1) == [10.0]


def test_the_minimum_moves_to_the_factor_just_tried_and_the_next_candidate_stays():
    controller = scripted()
    sent = drive(controller, SCRIPT | {20.0: 0.945}, 4 * WINDOW)
    assert sent == [20.0] * WINDOW + [40.0] * WINDOW + [20.0] * 2 * WINDOW
    assert controller.rules.factors[controller.minimum] == 20.0


def test_the_minimum_may_reach_the_last_factor():
    controller = scripted()
    drive(controller, dict.fromkeys(SCRIPT, 0.9), 6 * WINDOW)
    factors = controller.rules.factors
    assert (factors[controller.minimum], factors[controller.candidate]) == (1000.0, 1000.0)
    assert drive(controller, SCRIPT, 1) == [1.0]


def test_throughputs_that_are_equal_end_the_search_at_the_lower_factor():
    """Criterion 5, with the published throughputs; then the same through iterations whose costs are given."""
    factors = ladder(10.0, 2000.0, "geometric")
    throughputs = [math.nan] * (len(factors) - 2) + [1029.9, 1035.4]
    assert factors[saturated(throughputs, 0.01)] == 1280.0
    assert saturated(throughputs, 0.005) is None
    assert saturated([math.nan, 3.0, math.nan], 0.01) is None
    assert saturated([math.nan, 1035.4, 500.0, 1030.0], 0.01) == 1
    costs = {factor: 1 / factor for factor in factors} | {1280.0: 1 / 1029.9, 2000.0: 1 / 1035.4}
    controller = scripted(factors=factors, saturation=True, gain=0.01)
    tried = []
    for _ in range(12 * WINDOW):
        # Each gain is far enough below the last one that the minimum stays.
        tried.append(controller.choose(1.0, 0.95))
        controller.finish(0.95 * costs[tried[-1]])
    assert tried[::WINDOW] == [*factors[2:], 1280.0, 1280.0, 1280.0, 1280.0]
    assert factors[controller.minimum] == 10.0


def test_a_saturated_factor_is_never_below_the_minimum():
    controller = scripted(saturation=True)
    controller.minimum, controller.throughputs[:3] = 3, [5.0, 5.0, 1.0]
    controller.iterations = WINDOW - 1
    assert drive(controller, SCRIPT | {20.0: 0.3, 40.0: 0.75}, 1) == [40.0]
    assert controller.candidate == 3


def test_gains_are_smoothed_and_begin_anew_with_another_factor():
    controller = scripted(smoothing=0.25)
    controller.choose(0.9, 0.8)
    controller.choose(0.5, 0.4)
    assert (controller.gain_minimum, controller.gain_candidate) == pytest.approx((0.8, 0.7))
    for _ in range(WINDOW):
        controller.finish(1.0)
    assert controller.gain_minimum == pytest.approx(0.8) and math.isnan(controller.gain_candidate)
    controller.choose(0.8, 0.1)
    assert controller.gain_candidate == pytest.approx(0.1)


def test_gains_that_are_not_finite_send_everything_and_are_forgotten():
    controller = scripted()
    drive(controller, SCRIPT, 2)
    assert controller.choose(math.nan, math.nan) == 1.0
    controller.finish(1.0)
    assert drive(controller, SCRIPT, 1) == [20.0]


def test_a_controller_goes_on_from_what_it_saved():
    for iterations in (0, 3, 7, 14):
        one, other = scripted(saturation=True), scripted(saturation=True)
        drive(one, SCRIPT, iterations)
        other.load(one.save())
        assert drive(other, SCRIPT, 30) == drive(one, SCRIPT, 30)
        assert str(other.save()) == str(one.save())


def gain(values: Tensor, factor: float, compressor: str = "topk") -> float:
    kept = COMPRESSORS[compressor](values, round(len(values) / factor), (0,))
    return float(values[kept].square().sum() / values.square().sum())


def test_gains_of_known_distributions():
    """Criterion 1."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(10**6, generator=generator)
    for factor, expected in {2: 0.929, 4: 0.724, 10: 0.439, 100: 0.085, 1000: 0.013}.items():
        assert gain(normal, factor) == pytest.approx(expected, abs=0.01)
    laplace = torch.empty(10**6).exponential_(generator=generator)
    assert gain(laplace, 10) == pytest.approx(0.597, abs=0.01)
    heavy = (2 * torch.randn(10**6, generator=generator, dtype=torch.float64)).exp()
    for factor, expected in {10: 0.996, 100: 0.941, 1000: 0.775}.items():
        assert gain(heavy, factor) == pytest.approx(expected, abs=0.01 if factor < 1000 else 0.06)
    for factor in (2, 10):
        assert gain(normal, factor, "randomk") == pytest.approx(1 / factor, abs=0.01)


def test_two_levels_find_what_one_level_does():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    least = top(values, 2500, ())
    assert set(least[top(values[least], 500, ())].tolist()) == set(top(values, 500, ()).tolist())
    drawn = anywhere(values, 500, (1, 2))
    assert len(set(drawn.tolist())) == 500 and not torch.equal(drawn, anywhere(values, 500, (1, 3)))


def test_the_controller_falls_back_when_feedback_has_lowered_the_gain():
    """Criterion 3: heavy-tailed gradients at a factor of 100, whose residual fills; once it is sent, compression begins anew."""
    count = 50000

    def measure(controller: Controller, iterations: int) -> tuple[list[float], list[float]]:
        generator, residual = torch.Generator().manual_seed(0), torch.zeros(count, dtype=torch.float64)
        gains, sent = [], []
        for _ in range(iterations):
            sizes = (2 * torch.randn(count, generator=generator, dtype=torch.float64)).exp()
            total = residual + sizes * torch.randn(count, generator=generator).sign()
            gains.append(gain(total, 100))
            sent.append(controller.choose(gains[-1], gains[-1]))
            controller.finish(1.0)
            residual = torch.zeros_like(total) if sent[-1] == 1 else total.index_fill(0, top(total, count // 100, ()), 0)
        return gains, sent

    rules = {"factors": (1.0, 100.0), "omega": 0.01, "window": 1000, "smoothing": 0.2}
    gains, _ = measure(Controller(Rules(gain=0.01, **rules)), 80)
    assert gains[0] == pytest.approx(0.94, abs=0.02)
    assert sum(gains[15:26]) / 11 == pytest.approx(0.57, abs=0.12)
    assert sum(gains[50:]) / 30 == pytest.approx(0.33, abs=0.08)
    _, sent = measure(Controller(Rules(gain=0.6, **rules)), 60)
    fallen = sent.index(1.0)
    assert 5 < fallen < 50
    assert 100.0 in sent[fallen:]


def gradients(replica: int, step: int, dtype: torch.dtype = torch.float64, heavy: float = 0.0) -> dict[str, Tensor]:
    """Return gradients, heavy-tailed if asked to."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    named = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: (tensor.sign() * (heavy * tensor.abs()).exp() if heavy else tensor).to(dtype) for name, tensor in named.items()}


def make(peers: Peers, dtype: torch.dtype = torch.float64, **options) -> GraVAC:
    return GraVAC(GraVACOptions(name="gravac", **options), RunConfig(), peers, gradients(0, 0, dtype))


def run(peers: Peers, exchange: GraVAC, steps: range, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    """Exchange for some steps, of which some have gradients that cannot be compressed; return what each step gave."""
    given = []
    for step in steps:
        named = gradients(peers.index, step, dtype, heavy=3.0 if step % 8 < 5 else 0.0)
        exchange.gradients(named, step)
        exchange.commit()
        given.append(named | {"factor": torch.tensor(exchange.figures["factor"])})
    return given


BUSY = {"minimum": 4.0, "maximum": 64.0, "gain": 0.8, "window": 4, "smoothing": 1.0}
"""Options under which the steps of `run` take all branches."""


def test_it_is_found_by_name_with_its_options():
    assert "gravac" in EXCHANGES.names()
    options = options_from_spec("exchange", "gravac:minimum=3,gain=0.7,policy=exponential,compressor=randomk")
    assert EXCHANGES.load("gravac") is GraVAC and options == GraVACOptions(
        name="gravac", minimum=3.0, gain=0.7, policy="exponential", compressor="randomk"
    )
    options.check(RunConfig())
    (exchange,) = together(1, make)
    assert exchange.talks_before(0) and not exchange.talks_after(0)


@pytest.mark.parametrize(
    "options",
    [
        *({"minimum": value} for value in (1.0, 0.5, math.nan, math.inf)),
        *({"maximum": value} for value in (1.5, math.inf, math.nan)),
        *({"gain": value} for value in (0.0, 1.1)),
        *({"omega": value} for value in (-0.1, 1.0)),
        {"window": 0},
        {"smoothing": 1.5},
        {"compute": 0.0},
        {"policy": "linear"},
        {"compressor": "dct"},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ValueError, match=rf"exchange\.{next(iter(options))} is .*; choose"):
        GraVACOptions(name="gravac", **options).check(RunConfig())


def test_the_default_begins_where_a_gaussian_can_be_compressed():
    """Criterion 2: with the published minimum of 10 and gain of 0.7, gradients like a transformer's would all travel whole."""

    def factors(peers, **options):
        exchange, found = make(peers, **options), []
        for step in range(6):
            exchange.gradients(gradients(peers.index, step), step)
            exchange.commit()
            found.append(exchange.figures["factor"])
        return found

    assert together(2, lambda peers: factors(peers, minimum=10.0, maximum=1000.0, gain=0.7)) == [[1.0] * 6] * 2
    assert all(min(found) >= 2 for found in together(2, factors))


def test_nothing_is_lost_whatever_was_sent():
    """The sum of all gradients is the sum of all that was sent and the residual, which is none after sending all (criterion 6)."""
    results = together(4, lambda peers: (exchange := make(peers, **BUSY), run(peers, exchange, range(40))))
    factors = [float(named["factor"]) for named in results[0][1]]
    assert len(set(factors)) >= 4 and 1.0 in factors
    for name in LARGE:
        raw = sum(gradients(replica, step, heavy=3.0 if step % 8 < 5 else 0.0)[name] for replica in range(4) for step in range(40)) / 4
        sent = sum(named[name] for named in results[0][1])
        left = sum(exchange.state[f"residual/{name}"] for exchange, _ in results) / 4
        assert (raw - sent - left).abs().max() < 1e-12 * raw.abs().max()
    until = factors.index(1.0) + 1
    results = together(4, lambda peers: (exchange := make(peers, **BUSY), run(peers, exchange, range(until))))
    assert not any(exchange.state[f"residual/{name}"].any() for exchange, _ in results for name in LARGE)


@pytest.mark.parametrize("graph", ["complete", "ring"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("compressor", ["topk", "randomk"])
def test_all_replicas_end_with_the_same_bits(graph, dtype, compressor):
    options = BUSY | {"compressor": compressor} | ({"gain": 0.1} if compressor == "randomk" else {})
    results = together(4, lambda peers: run(peers, make(peers, dtype, **options), range(10), dtype), graph)
    assert len({float(named["factor"]) for named in results[0]}) > 1
    for step in range(10):
        for name in (*SHAPES, "factor"):
            assert results[0][step][name].any() and results[0][step][name].dtype == (dtype if name in SHAPES else torch.float32)
            assert all(torch.equal(given[step][name], results[0][step][name]) for given in results)


def test_bytes_are_those_of_the_values_of_the_norms_and_of_the_rest_whole():
    def task(peers):
        exchange, named = make(peers, minimum=4.0, maximum=16.0, gain=0.2), gradients(peers.index, 0)
        exchange.gradients(named, 0)
        sent = [
            gradients(peers.index, 0)[name].where(exchange._proposed[f"residual/{name}"] == 0, 0.0)  # what is not left over was sent
            for name in LARGE
        ]
        return peers.sent, [int(tensor.count_nonzero()) for tensor in sent], len(Sparse().pack(sent)), exchange.figures["factor"]

    for sent, kept, packed, factor in together(2, task):
        assert factor == 8.0 and kept == [96, 40]
        assert packed == (1 + 3 + 108 + 96 * 8) + (1 + 40 + 40 * 8)  # positions, and a bitmap
        assert sent == packed + (3 + 5 * 5 + 300) * 8


def test_an_abandoned_step_leaves_no_trace():
    def task(peers):
        exchange = make(peers, **BUSY)
        run(peers, exchange, range(7))
        before = {name: tensor.clone() for name, tensor in exchange.state.items()}
        once, again = gradients(peers.index, 7), gradients(peers.index, 7)
        exchange.gradients(once, 7)
        kept = str(before) == str(exchange.state)
        exchange.gradients(again, 7)
        return kept and all(torch.equal(once[name], again[name]) for name in SHAPES)

    assert together(2, task) == [True, True]


def test_state_survives_a_checkpoint():
    def task(peers):
        whole, first, second = (make(peers, **BUSY) for _ in range(3))
        given = run(peers, whole, range(20))
        run(peers, first, range(11))
        second.load_state(load(save(first.state)))
        again = run(peers, second, range(11, 20))
        same = all(torch.equal(one[name], other[name]) for one, other in zip(again, given[11:], strict=True) for name in one)
        return same and all(torch.equal(second.state[name], tensor) or tensor.isnan() for name, tensor in whole.state.items())

    assert together(2, task) == [True, True]


def test_a_state_that_lacks_something_or_is_of_other_options_is_refused_by_name():
    (exchange,) = together(1, make)
    for name in exchange.state:
        with pytest.raises(ValueError, match=f"the checkpoint holds no {name}, which gravac needs"):
            exchange.load_state({other: tensor for other, tensor in exchange.state.items() if other != name})
    with pytest.raises(ValueError, match=r"the checkpoint holds throughput_99\.0"):
        exchange.load_state(exchange.state | {"throughput_99.0": torch.zeros(())})
    with pytest.raises(ValueError, match="which gravac needs"):
        exchange.load_state({})


@pytest.mark.parametrize("compressor", ["topk", "randomk"])
def test_a_gradient_that_is_not_finite_reaches_everyone(compressor):
    def task(peers):
        exchange = make(peers, compressor=compressor)
        named = gradients(peers.index, 0)
        named["wide"][1, 2] = math.inf if peers.index else 0.0
        exchange.gradients(named, 0)
        return bool(named["wide"].isfinite().all()), exchange.figures["factor"]

    assert together(2, task) == [(False, 1.0)] * 2


def test_gradients_of_zeros_are_compressed_like_any():
    def task(peers):
        exchange = make(peers)
        named = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        exchange.gradients(named, 0)
        return any(tensor.any() for tensor in named.values()), exchange.figures["factor"]

    assert together(2, task) == [(False, 4.0)] * 2


def test_cost_falls_with_the_factor_and_counts_what_replicas_send():
    def task(peers):
        exchange = make(peers, compute=0.25)
        return [exchange.cost(factor, 4) for factor in (1.0, 2.0, 4.0, 16.0, 1e6)]

    for costs in together(4, task):
        assert costs[0] == 0.25 + 1.5
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] == pytest.approx(0.25, abs=0.01)
