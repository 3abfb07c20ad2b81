"""The laws every codec in the registry obeys, alone and with `quantize` behind it."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY
from thinwire.codecs import registry
from thinwire.codecs.base import Codec, Context
from thinwire.model.cut import StagePlan

BATCH, TIME = 3, 5
VARIANTS = [(name, {}) for name in registry.names()]
VARIANTS += [(name, {"bits": bits}) for name in registry.names() for bits in (8, 4, 2)]
VARIANTS += [("dense", {"dtype": "fp32"}), ("subspace", {"dtype": "fp32"}), ("subspace", {"rank": 5, "bits": 4})]
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
        self.exit = codec.ends(StagePlan(0, 2, range(2)))[1]
        self.entry = codec.ends(StagePlan(1, 2, range(2, 4)))[0]
        if state:
            self.exit.load_state_dict(state[0])
            self.entry.load_state_dict(state[1])
        self.specs = codec.spec(BATCH, TIME).tensors
        self.ids = torch.zeros(BATCH, TIME, dtype=torch.int64)

    def run(self, source: torch.Tensor, gradient: torch.Tensor) -> None:
        self.source = source.clone().requires_grad_()
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
        for slot, (tensor, spec) in enumerate(zip(tensors, self.specs, strict=True)):
            assert tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype
            data = self.codec.pack(slot, tensor, direction)
            assert len(data) == spec.size(direction) or (len(data) < spec.size(direction) and not spec.exact)
            back = self.codec.unpack(slot, data, spec, direction)
            assert back.dtype == tensor.dtype and torch.equal(back, tensor.detach())
            packed.append(data)
            arrived.append(back)
        return packed, arrived


def cross(name: str, options: dict, kind: str = "gaussian", step: int = 0, state=None) -> Crossing:
    codec = registry.build(registry.defaults(name, **options), TINY, seed=5)
    crossing = Crossing(codec, step, state)
    shape = (BATCH, TIME, codec.width)
    crossing.run(INPUTS[kind](shape), INPUTS[kind](shape).flip(0))
    return crossing


@every_variant
@every_input
def test_round_trip_keeps_form_and_stays_within_the_stated_error(name, options, kind):
    crossing = cross(name, options, kind)
    source, output = crossing.source.detach(), crossing.output.detach()
    assert output.shape == source.shape and output.dtype == source.dtype
    assert output.isfinite().all()
    assert ((output - source).abs() <= crossing.codec.error_bound(source)).all()


@every_variant
@every_input
def test_gradient_exists_and_is_finite(name, options, kind):
    gradient = cross(name, options, kind).source.grad
    assert gradient is not None and gradient.isfinite().all()
    if kind == "gaussian":
        wanted = INPUTS[kind](gradient.shape).flip(0)
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), wanted.flatten(), dim=0) > 0.7


@every_variant
def test_same_seed_same_bytes(name, options):
    first, second = cross(name, options), cross(name, options)
    assert first.forward == second.forward and first.backward == second.backward


@every_variant
def test_state_survives_save_and_load(name, options):
    first = cross(name, options)
    state = first.exit.state_dict(), first.entry.state_dict()
    second = cross(name, options, state=state)
    assert first.forward == second.forward and first.backward == second.backward


@every_variant
def test_bytes_of_another_length_are_refused(name, options):
    crossing = cross(name, options)
    for slot, spec in enumerate(crossing.specs):
        with pytest.raises(ValueError, match="bytes where"):
            crossing.codec.unpack(slot, crossing.forward[slot] + b"\0", spec, "forward")


@every_variant
def test_bytes_per_token_are_those_sent(name, options):
    crossing = cross(name, options)
    spec = crossing.codec.spec(BATCH, TIME)
    assert spec.bytes_per_token("forward") == sum(map(len, crossing.forward)) / (BATCH * TIME)
    assert spec.bytes_per_token("backward") == sum(map(len, crossing.backward)) / (BATCH * TIME)


def test_a_value_that_is_not_finite_is_not_hidden():
    for name, options in VARIANTS:
        codec = registry.build(registry.defaults(name, **options), TINY, seed=5)
        crossing = Crossing(codec)
        source = torch.ones(BATCH, TIME, codec.width)
        source[0, 0, 0] = torch.nan
        sent = crossing.exit(source, crossing.ids, crossing.context)
        packed = [codec.pack(slot, tensor, "forward") for slot, tensor in enumerate(sent)]
        arrived = [codec.unpack(slot, data, spec, "forward") for slot, (data, spec) in enumerate(zip(packed, crossing.specs, strict=True))]
        output = crossing.entry(tuple(arrived), crossing.ids, crossing.context)
        assert output[0, 0].isnan().any() and output[1:].isfinite().all(), name


def test_unknown_codec_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="unknown codec 'sub'; choose one of dense, quantize, subspace"):
        registry.find("sub")


def test_third_party_codec_is_found_through_its_entry_point(monkeypatch):
    from importlib.metadata import EntryPoint, EntryPoints

    point = EntryPoint("halves", "thinwire.codecs.dense:Dense", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **chosen: EntryPoints([point]).select(**chosen))
    assert "halves" in registry.names()
    assert registry.find("halves").__name__ == "Dense"
