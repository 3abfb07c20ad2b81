"""The hybrid policies: what gradients travel in, which boundaries go with them, and what becomes of what is lost."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers import TINY
from thinwire.bits.grid import make_grid
from thinwire.bits.packing import make_packing
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.options import options_from_spec
from thinwire.config.sections import PipelineConfig, ReplicasConfig, RunConfig
from thinwire.replicas.exchange import make_exchange
from thinwire.replicas.hybrid import PRESETS, Hybrid
from thinwire.replicas.peers import Peers
from thinwire.testing.together import together

SHAPES = {"matrix": (64, 512), "vector": (512,)}


def config_of(text: str, stages: int = 2, codec: str = "dense", **options) -> RunConfig:
    exchange = options_from_spec("exchange", f"hybrid{text}")
    return RunConfig(
        replicas=ReplicasConfig(count=2), exchange=exchange, pipeline=PipelineConfig(stages=stages), codec=codec_defaults(codec, **options)
    )


def check(config: RunConfig) -> None:
    config.exchange.check(config)


def script(step: int, replica: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def exchange_of(peers: Peers, text: str, like: dict[str, torch.Tensor] | None = None) -> Hybrid:
    method = make_exchange(config_of(text, stages=1), peers, script(0, 0) if like is None else like)
    assert isinstance(method, Hybrid) and method.meets(0)
    return method


def rates_of(text: str) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Return the bits per value between two replicas, and what each makes of the gradients."""

    def task(peers):
        named = script(0, peers.index)
        exchange_of(peers, text).gradients(named, 0)
        return peers.sent * 8 / (64 * 512 + 512), named

    return together(2, task)


@pytest.mark.parametrize("text, rate, error", [("", 8, 1.2e-2), (":preset=naive", 8, 9e-2), (":preset=zhybrid,rate=12", 12, 5e-3)])
def test_gradients_travel_at_the_rate_of_the_preset(text, rate, error):
    if text:
        pytest.importorskip("zfpy")
    (first, found), (second, other) = rates_of(text)
    assert (first + second) / 2 == pytest.approx(rate, rel=0.02 if not text else 0.01)  # int8 has scales
    for name, tensor in found.items():
        exact = (script(0, 0)[name] + script(0, 1)[name]) / 2
        assert torch.equal(tensor, other[name])
        assert error / 4 < float((tensor - exact).norm() / exact.norm()) < error


@pytest.mark.parametrize(
    "text, codec, options, rate",
    [
        (":preset=zhybrid", "dense", {"dtype": "bf16"}, 16),
        (":preset=zhybrid,high_rate=32", "dense", {"dtype": "fp32"}, 32),
        (":preset=zhybrid,high_rate=8,rate=4", "quantize", {"bits": 8}, 8),
        (":preset=naive", "quantize", {"bits": 8}, 8),
        (":preset=naive,rate=4", "quantize", {"bits": 4}, 4),
        (":preset=naive,rate=16", "dense", {}, 16),
    ],
)
def test_boundaries_of_a_policy_have_its_rate(text, codec, options, rate):
    """The rate that the policy names is the one at which the codec it accepts sends, but for the scale of a token."""
    pytest.importorskip("zfpy")
    config = config_of(text, codec=codec, **options)
    check(config)
    width = 2048
    spec = make_codec(config.codec, dataclasses.replace(TINY, width=width)).spec(2, 4)
    for direction in ("forward", "backward"):
        assert spec.bytes_per_token(direction) * 8 / width == pytest.approx(rate, rel=0.01)


def test_boundaries_lose_what_the_policy_says_they_do():
    pytest.importorskip("zfpy")
    values = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))

    def relative(found: torch.Tensor) -> float:
        return float((found - values).norm() / values.norm())

    assert relative(values.bfloat16().float()) == pytest.approx(1.7e-3, rel=0.05)
    for bits, quantized, zfp in ((8, 7.4e-3, 5.4e-2), (4, 0.13, 0.97)):
        grid, packing = make_grid(bits), make_packing(f"zfp{bits}")
        assert relative(grid.dequantize(*grid.quantize(values), values.dtype)) == pytest.approx(quantized, rel=0.05)
        assert relative(packing.unpack(packing.pack([values]), [values], 0)[0]) == pytest.approx(zfp, rel=0.05)


def test_any_boundary_goes_with_int8_and_none_is_asked_for_where_there_is_none():
    pytest.importorskip("zfpy")
    for codec in ("subspace", "topk", "dense"):
        check(config_of("", codec=codec))
    for preset in PRESETS:
        check(config_of(f":preset={preset}", stages=1, codec="topk"))
    check(config_of(":preset=mzhybrid", codec="lossless"))


@pytest.mark.parametrize(
    "text, codec, options, told",
    [
        (":preset=mzhybrid", "dense", {}, "boundaries lossless, but codec.name is dense; add --codec.name lossless, or choose preset int8"),
        (":preset=mzhybrid", "lossless", {"bits": 8}, "boundaries lossless, but codec.bits is 8; leave --codec.bits out"),
        (":preset=zhybrid", "subspace", {}, "in 16 bits per value, but codec.name is subspace; add --codec.name dense"),
        (":preset=zhybrid", "dense", {"bits": 8}, "in 16 bits per value, but codec.bits is 8; leave --codec.bits out"),
        (":preset=zhybrid", "dense", {"dtype": "fp32"}, "in 16 bits per value, but codec.dtype is fp32; add --codec.dtype bf16"),
        (":preset=naive", "dense", {}, "in 8 bits per value, but codec.name is dense; add --codec.name quantize"),
        (":preset=naive", "quantize", {"bits": 4}, "in 8 bits per value, but codec.bits is 4; add --codec.bits 8"),
        (":preset=naive", "quantize", {"bits": 8, "backward_bits": 2}, "codec.backward_bits is 2; leave --codec.backward_bits out"),
        (":preset=naive,rate=12", "dense", {}, r"exchange\.rate is 12, but no codec sends .* choose one of 3, 4, 8, 16, 32"),
        (":preset=zhybrid,high_rate=24", "dense", {}, r"exchange\.high_rate is 24, but no codec sends .* choose one of 3, 4, 8, 16, 32"),
        (":preset=mz", "dense", {}, r"exchange\.preset is 'mz'; choose one of int8, mzhybrid, zhybrid, naive"),
        (":rate=12", "dense", {}, r"exchange\.rate is 12, but preset int8 always takes 8 bits; leave rate out"),
        (":high_rate=32", "dense", {}, r"exchange\.high_rate is 32, but only preset zhybrid has one; leave it out"),
        (":preset=mzhybrid,rate=2", "lossless", {}, "zfp is given 2 bits per value; choose 3 to 32"),
        (":preset=mzhybrid,rate=4,feedback=true", "lossless", {}, r"exchange\.rate is 4 with feedback, .* choose 6 or more, or"),
    ],
)
def test_what_does_not_go_together_is_refused(text, codec, options, told):
    pytest.importorskip("zfpy")
    with pytest.raises(ValueError, match=told):
        check(config_of(text, codec=codec, **options))


def walk(method: Hybrid, steps: range, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    found = []
    for step in steps:
        named = script(step, method.peers.index, dtype)
        method.gradients(named, step)
        method.commit()
        found.append(named)
    return found


@pytest.mark.parametrize("text", [":feedback=true", ":preset=mzhybrid,rate=6,feedback=true"])
@pytest.mark.parametrize("graph", ["complete", "0-1,1-2"])
def test_with_feedback_nothing_is_lost_for_good(text, graph):
    """Over all steps what was applied and the mean of what is held back are the mean gradient, and what is held back stays small."""
    if "mzhybrid" in text:
        pytest.importorskip("zfpy")
    steps = range(10)

    def task(peers):
        method = exchange_of(peers, text)
        found = walk(method, steps, torch.float64)
        return found, method.state, method.figures["residual"]

    results = together(3, task, graph)
    for name in SHAPES:
        given = sum(script(step, replica, torch.float64)[name] for step in steps for replica in range(3)) / 3
        applied = sum(found[name] for found in results[0][0])
        kept = sum(state[f"residual/{name}"] for _, state, _ in results) / 3
        assert (given - applied).abs().max() > 1e-3
        torch.testing.assert_close(given, applied + kept, rtol=0, atol=1e-12)
    assert all(0 < share < 0.9 for _, _, share in results)


def test_a_value_below_half_a_step_arrives_with_feedback_alone():
    """A row whose largest value is 1 has steps of 1/127: 0.002 every time is rounded off every time."""
    small = torch.full((2, 32), 0.002)
    small[:, 0] = 1

    def task(peers, text):
        method = exchange_of(peers, text, {"m": small})
        applied = torch.zeros_like(small)
        for step in range(20):
            named = {"m": small.clone()}
            method.gradients(named, step)
            method.commit()
            applied += named["m"]
        return applied[:, 1:]

    assert torch.equal(together(2, lambda peers: task(peers, ""))[0], torch.zeros(2, 31))
    fed = together(2, lambda peers: task(peers, ":feedback=true"))[0]
    assert ((fed - 0.04).abs() < 1 / 127).all()


def test_a_run_goes_on_from_its_state_and_a_state_with_gaps_is_refused():
    def task(peers):
        method = exchange_of(peers, ":feedback=true")
        walk(method, range(3), torch.float32)
        again = exchange_of(peers, ":feedback=true")
        again.load_state(method.state)
        method.gradients(script(99, peers.index), 3)  # abandoned: never committed
        method.load_state(method.state)
        for one, other in zip(walk(method, range(3, 5), torch.float32), walk(again, range(3, 5), torch.float32), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SHAPES)
        with pytest.raises(ValueError, match="the checkpoint holds no residual/vector, which hybrid with feedback needs to go on"):
            again.load_state({"residual/matrix": torch.zeros(64, 512)})
        plain = exchange_of(peers, "")
        plain.load_state(method.state)
        assert not plain.state
        return True

    assert together(2, task) == [True, True]
