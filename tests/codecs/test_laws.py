"""The laws every codec in the registry obeys, alone, with `quantize` behind it and with entropy coding."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY
from thinwire.codecs.base import Codec, LossyOptions
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.registry import CODECS
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context

BATCH, TIME = 3, 5
UNQUANTIZED = {"threshold", "nothing", "rvq"}
"""Codecs that refuse bits."""
SILENT = {"nothing"}
"""Codecs by which no value crosses."""
VARIANTS = [(name, {}) for name in CODECS.names()]
VARIANTS += [(name, {"bits": bits}) for name in CODECS.names() if name not in UNQUANTIZED for bits in (8, 4, 3, 2, 1)]
VARIANTS += [(name, {"warmup": 5}) for name in CODECS.names() if issubclass(CODECS.load(name).Options, LossyOptions)]
VARIANTS += [(name, {"warmup": 5, "step": 5}) for name in CODECS.names() if issubclass(CODECS.load(name).Options, LossyOptions)]
VARIANTS += [("dense", {"dtype": "fp32"}), ("subspace", {"dtype": "fp32"}), ("subspace", {"rank": 5, "bits": 4})]
CODED = {"rate": 2.0}, {"bits": 3}, {"rate": 0.5, "backward_rate": 1.5, "rounding": "stochastic"}
ENTROPY = ("dense", "subspace", "anchored", "bottleneck", "autoencoder", "randomk")
"""Codecs that entropy coding can stand behind."""
VARIANTS += [(name, {"entropy": True} | aim) for name in ENTROPY for aim in CODED]
VARIANTS += [
    ("dense", {"dtype": "fp32", "entropy": True, "rate": 1.0}),
    ("hadamard", {"entropy": True}),
    ("anchored", {"entropy": True, "rate": 1.0, "dither": "both", "boundary_rates": "1.5/0.5", "steer": "penalty"}),
    ("subspace", {"entropy": True, "bits": 2, "dither": "backward"}),
    ("randomk", {"entropy": True, "bits": 4, "warmup": 5, "step": 5}),
]
INPUTS = {
    "gaussian": lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(1)),
    "zeros": torch.zeros,
    "constant": lambda shape: torch.full(shape, 0.37),
    "large": lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 1e4,
    "denormal": lambda shape: torch.full(shape, 1e-40),
    "one outlier": lambda shape: torch.nn.functional.pad(torch.full((*shape[:-1], 1), 1e4), (0, shape[-1] - 1), value=1e-3),
}
every_variant = pytest.mark.parametrize("name, options", VARIANTS, ids=lambda value: str(value))
every_input = pytest.mark.parametrize("kind", INPUTS)


class Crossing:
    """One boundary of a codec with everything that crossed it."""

    def __init__(self, codec: Codec, step: int = 0, state: tuple[dict, dict] | None = None) -> None:
        self.codec = codec
        self.context = Context(step, torch.arange(BATCH))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.exit = codec.ends(StagePlan(0, 2, range(2)))[1]
            self.entry = codec.ends(StagePlan(1, 2, range(2, 4)))[0]
        if state:
            self.exit.load_state_dict(state[0])
            self.entry.load_state_dict(state[1])
        exit, entry = codec.with_end(self.exit), codec.with_end(self.entry)
        self.codecs = {"forward": (exit, entry), "backward": (entry, exit)}
        """Who packs and who unpacks."""
        self.specs = codec.spec(BATCH, TIME).tensors
        self.ids = torch.zeros(BATCH, TIME, dtype=torch.int64)

    def run(self, source: torch.Tensor, gradient: torch.Tensor) -> None:
        self.source = source.clone().requires_grad_()
        self.context.kept.clear()  # sender and receiver are two stages
        sent = self.exit(self.source, self.ids, self.context)
        self.forward, arrived = self.carry(sent, "forward")
        leaves = [tensor.requires_grad_() for tensor in arrived]
        self.output = self.entry(tuple(leaves), self.ids, self.context)
        self.output.backward(gradient)
        self.backward, returned = self.carry([leaf.grad for leaf in leaves], "backward")
        torch.autograd.backward(sent, returned)

    def carry(self, tensors, direction):
        """Pack and unpack a payload; check form, declared bytes and the pack law on the way."""
        assert len(tensors) == len(self.specs)
        packed, arrived = [], []
        sender, receiver = self.codecs[direction]
        for slot, (tensor, spec) in enumerate(zip(tensors, self.specs, strict=True)):
            assert tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype
            data = sender.pack(slot, tensor, direction)
            assert len(data) == spec.size(direction) or (len(data) < spec.size(direction) and not spec.exact)
            back = receiver.unpack(slot, data, spec, direction)
            assert back.dtype == tensor.dtype and torch.equal(back, tensor.detach())
            packed.append(data)
            arrived.append(back)
        return packed, arrived


def build(name: str, options: dict) -> Codec:
    given = {key: value for key, value in options.items() if key != "step"}
    return make_codec(codec_defaults(name, **given), TINY, seed=5).at(2)


def cross(name: str, options: dict, kind: str = "gaussian", state=None) -> Crossing:
    codec = build(name, options)
    crossing = Crossing(codec, options.get("step", 0), state)
    shape = (BATCH, TIME, codec.sent_width)
    crossing.run(INPUTS[kind](shape), INPUTS[kind]((BATCH, TIME, codec.width)).flip(0))
    return crossing


@every_variant
@every_input
def test_round_trip_keeps_form_and_stays_within_the_stated_error(name, options, kind):
    crossing = cross(name, options, kind)
    source, output = crossing.source.detach(), crossing.output.detach()
    assert output.shape == (*source.shape[:-1], crossing.codec.width) and output.dtype == source.dtype
    assert output.isfinite().all()
    bound = crossing.codec.error_bound(source)
    assert bound is None or ((output - source).abs() <= bound).all()


@every_variant
@every_input
def test_gradient_exists_and_is_finite(name, options, kind):
    crossing = cross(name, options, kind)
    gradient = crossing.source.grad
    assert gradient is not None and gradient.isfinite().all()
    if kind == "gaussian":
        assert gradient.any() == (name not in SILENT)
    if kind == "gaussian" and crossing.codec.error_bound(crossing.source.detach()) is not None:
        wanted = INPUTS[kind](gradient.shape).flip(0)
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), wanted.flatten(), dim=0) > 0


@every_variant
def test_same_seed_same_bytes(name, options):
    first, second = cross(name, options), cross(name, options)
    assert first.forward == second.forward and first.backward == second.backward


@every_variant
def test_state_survives_save_and_load(name, options):
    """Go on after a step, with the pair that did it and with a new one that was given its state: both send the same."""
    first = cross(name, options)
    step = options.get("step", 0) + 1
    second = Crossing(first.codec, step, (first.exit.state_dict(), first.entry.state_dict()))
    first.context = Context(step, torch.arange(BATCH))
    for crossing in (first, second):
        crossing.run(INPUTS["gaussian"](first.source.shape) * 1.2, INPUTS["gaussian"](first.output.shape))
    assert first.forward == second.forward and first.backward == second.backward


@every_variant
def test_bytes_of_another_length_are_refused(name, options):
    crossing = cross(name, options)
    for slot, spec in enumerate(crossing.specs):
        with pytest.raises(ValueError, match="bytes where"):
            crossing.codecs["forward"][1].unpack(slot, crossing.forward[slot] + b"\0", spec, "forward")


@every_variant
def test_bytes_per_token_are_those_sent(name, options):
    crossing = cross(name, options)
    spec = crossing.codec.spec(BATCH, TIME)
    exact = all(tensor.exact for tensor in spec.tensors)
    for direction, packed in (("forward", crossing.forward), ("backward", crossing.backward)):
        sent = sum(map(len, packed)) / (BATCH * TIME)
        assert sent == spec.bytes_per_token(direction) if exact else sent <= spec.bytes_per_token(direction)


def test_a_value_that_is_not_finite_is_not_hidden():
    for name, options in VARIANTS:
        if name in SILENT:
            continue
        codec = build(name, options)
        crossing = Crossing(codec, options.get("step", 0))
        source = torch.ones(BATCH, TIME, codec.sent_width)
        source[0, 0, 0] = torch.nan
        sent = crossing.exit(source, crossing.ids, crossing.context)
        sender, receiver = crossing.codecs["forward"]
        packed = [sender.pack(slot, tensor, "forward") for slot, tensor in enumerate(sent)]
        arrived = [
            receiver.unpack(slot, data, spec, "forward") for slot, (data, spec) in enumerate(zip(packed, crossing.specs, strict=True))
        ]
        output = crossing.entry(tuple(arrived), crossing.ids, crossing.context)
        assert output[0, 0].isnan().any() and output[1:].isfinite().all(), name


def test_unknown_codec_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"unknown codec 'sub'; choose one of anchored, .*dense, .*subspace"):
        CODECS.load("sub")


def test_third_party_codec_is_found_through_its_entry_point(monkeypatch):
    from importlib.metadata import EntryPoint, EntryPoints

    point = EntryPoint("halves", "thinwire.codecs.dense:Dense", CODECS.group)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **chosen: EntryPoints([point]).select(**chosen))
    assert "halves" in CODECS.names()
    assert CODECS.load("halves").__name__ == "Dense"
