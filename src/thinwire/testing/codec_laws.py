"""The laws every codec in the registry obeys, alone, with `quantize` behind it and with entropy coding; on any device.

Each takes the name of a codec and a variant of its options, and raises BrokenLaw. A plug-in's own test calls them with its name:

    for law in LAWS.values():
        law("coarse", {})
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Direction, LossyOptions
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.registry import CODECS
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.initial import OwnGenerator
from thinwire.testing.laws import CPU, TINY, Options, demand, demand_refusal

BATCH, TIME = 3, 5
UNQUANTIZED = {"threshold", "nothing", "rvq"}
"""Codecs that refuse bits."""
SILENT = {"nothing"}
"""Codecs by which no value crosses."""
ENTROPY = ("dense", "subspace", "anchored", "bottleneck", "autoencoder", "randomk")
"""Codecs that entropy coding can stand behind."""
CODED: tuple[Options, ...] = ({"rate": 2.0}, {"bits": 3}, {"rate": 0.5, "backward_rate": 1.5, "rounding": "stochastic"})
State = tuple[dict[str, Tensor], dict[str, Tensor]]


def variants_of_codecs() -> list[tuple[str, Options]]:
    """List what the laws are tried with; `step` is no option but the step that is made."""
    names = CODECS.names()
    lossy = [name for name in names if issubclass(CODECS.load(name).Options, LossyOptions)]
    variants: list[tuple[str, Options]] = [(name, {}) for name in names]
    variants += [(name, {"bits": bits}) for name in names if name not in UNQUANTIZED for bits in (8, 4, 3, 2, 1)]
    variants += [(name, {"warmup": 5}) for name in lossy]
    variants += [(name, {"warmup": 5, "step": 5}) for name in lossy]
    variants += [("dense", {"dtype": "fp32"}), ("subspace", {"dtype": "fp32"}), ("subspace", {"rank": 5, "bits": 4})]
    variants += [(name, {"entropy": True} | aim) for name in ENTROPY for aim in CODED]
    variants += [
        ("dense", {"dtype": "fp32", "entropy": True, "rate": 1.0}),
        ("hadamard", {"entropy": True}),
        ("anchored", {"entropy": True, "rate": 1.0, "dither": "both", "boundary_rates": "1.5/0.5", "steer": "penalty"}),
        ("subspace", {"entropy": True, "bits": 2, "dither": "backward"}),
        ("randomk", {"entropy": True, "bits": 4, "warmup": 5, "step": 5}),
    ]
    return variants


INPUTS: dict[str, Callable[[Sequence[int]], Tensor]] = {
    "gaussian": lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(1)),
    "zeros": torch.zeros,
    "constant": lambda shape: torch.full(shape, 0.37),
    "large": lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 1e4,
    "denormal": lambda shape: torch.full(shape, 1e-40),
    "one outlier": lambda shape: torch.nn.functional.pad(torch.full((*shape[:-1], 1), 1e4), (0, shape[-1] - 1), value=1e-3),
}


class Crossing:
    """One boundary of a codec with everything that crossed it."""

    def __init__(self, codec: Codec, step: int = 0, state: State | None = None, device: torch.device = CPU) -> None:
        self.codec, self.device = codec, device
        self.context = self.context_of(step)
        with OwnGenerator(7):
            exit_end, entry_end = codec.ends(StagePlan(0, 2, range(2)))[1], codec.ends(StagePlan(1, 2, range(2, 4)))[0]
        assert exit_end is not None and entry_end is not None
        self.exit, self.entry = exit_end.to(device), entry_end.to(device)
        if state:
            self.exit.load_state_dict(state[0])
            self.entry.load_state_dict(state[1])
        exit, entry = codec.with_end(self.exit), codec.with_end(self.entry)
        self.codecs: dict[Direction, tuple[Codec, Codec]] = {"forward": (exit, entry), "backward": (entry, exit)}
        """Who packs and who unpacks."""
        self.specs = codec.spec(BATCH, TIME).tensors
        self.ids = torch.zeros(BATCH, TIME, dtype=torch.int64, device=device)

    def context_of(self, step: int) -> Context:
        return Context(step, torch.arange(BATCH, device=self.device))

    def run(self, source: Tensor, gradient: Tensor) -> None:
        """Let a microbatch cross, and its gradient come back."""
        self.source = source.to(self.device).clone().requires_grad_()
        self.context.kept.clear()  # sender and receiver are two stages
        sent = self.exit(self.source, self.ids, self.context)
        self.forward, arrived = self.carry(sent, "forward")
        leaves = [tensor.requires_grad_() for tensor in arrived]
        self.output = self.entry(tuple(leaves), self.ids, self.context)
        self.output.backward(gradient.to(self.device))
        self.backward, returned = self.carry([leaf.grad for leaf in leaves], "backward")
        torch.autograd.backward(sent, returned)

    def carry(self, tensors: Sequence[Tensor | None], direction: Direction) -> tuple[list[bytes], list[Tensor]]:
        """Pack and unpack a payload; check form, declared bytes and the pack law on the way."""
        demand(len(tensors) == len(self.specs), f"{len(tensors)} tensors, {len(self.specs)} declared")
        packed, arrived = [], []
        sender, receiver = self.codecs[direction]
        for slot, (tensor, spec) in enumerate(zip(tensors, self.specs, strict=True)):
            assert tensor is not None
            demand(tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype, f"{tensor.shape} {tensor.dtype}, declared {spec}")
            data, most = sender.pack(slot, tensor.detach(), direction), spec.size(direction)
            demand(len(data) == most or (len(data) < most and not spec.exact), f"{len(data)} bytes, {most} declared")
            back = receiver.unpack(slot, data, spec, direction)
            same = back.dtype == tensor.dtype and torch.equal(back.cpu(), tensor.detach().cpu())
            demand(same, f"what was packed {direction} comes out otherwise")
            packed.append(data)
            arrived.append(back.to(self.device))
        return packed, arrived


def build_codec_variant(name: str, options: Options) -> Codec:
    """Make a codec in one of its variants, at the boundary in the middle of a tiny model."""
    given = {key: value for key, value in options.items() if key != "step"}
    return make_codec(codec_defaults(name, **given), TINY, seed=5).at(2)


def let_cross(name: str, options: Options, kind: str = "gaussian", device: torch.device = CPU) -> Crossing:
    """Let values of a kind cross a boundary."""
    codec = build_codec_variant(name, options)
    crossing = Crossing(codec, options.get("step", 0), device=device)
    shape = (BATCH, TIME, codec.sent_width)
    crossing.run(INPUTS[kind](shape), INPUTS[kind]((BATCH, TIME, codec.width)).flip(0))
    return crossing


def keeps_form_and_error(name: str, options: Options, device: torch.device = CPU, kind: str = "gaussian") -> None:
    """A round trip keeps form and stays within the stated error."""
    crossing = let_cross(name, options, kind, device)
    source, output = crossing.source.detach(), crossing.output.detach()
    demand(output.shape == (*source.shape[:-1], crossing.codec.width), f"{kind}: the output has the shape {tuple(output.shape)}")
    demand(output.dtype == source.dtype, f"{kind}: the output is {output.dtype}")
    demand(output.isfinite().all(), f"{kind}: the output is not finite")
    bound = crossing.codec.error_bound(source)
    demand(bound is None or ((output - source).abs() <= bound).all(), f"{kind}: the error is larger than stated")


def has_a_finite_gradient(name: str, options: Options, device: torch.device = CPU, kind: str = "gaussian") -> None:
    """A gradient comes back, is finite, and points where it should."""
    crossing = let_cross(name, options, kind, device)
    gradient = crossing.source.grad
    demand(gradient is not None and gradient.isfinite().all(), f"{kind}: no gradient, or one that is not finite")
    assert gradient is not None
    if kind != "gaussian":
        return
    demand(bool(gradient.any()) == (name not in SILENT), "the gradient is zero, or one of a codec that sends none is not")
    if crossing.codec.error_bound(crossing.source.detach()) is not None:
        wanted = INPUTS[kind](gradient.shape).flip(0)
        cosine = torch.nn.functional.cosine_similarity(gradient.cpu().flatten(), wanted.flatten(), dim=0)
        demand(cosine > 0, f"the gradient points elsewhere: cosine {float(cosine):.3f}")


def same_seed_same_bytes(name: str, options: Options, device: torch.device = CPU) -> None:
    """The same seed sends the same bytes."""
    first, second = let_cross(name, options, device=device), let_cross(name, options, device=device)
    demand(first.forward == second.forward and first.backward == second.backward, "other bytes with the same seed")


def state_survives_save_and_load(name: str, options: Options, device: torch.device = CPU) -> None:
    """After a step the pair that did it and a new one that was given its state send the same."""
    first = let_cross(name, options, device=device)
    step = options.get("step", 0) + 1
    second = Crossing(first.codec, step, (first.exit.state_dict(), first.entry.state_dict()), device)
    first.context = first.context_of(step)
    for crossing in (first, second):
        crossing.run(INPUTS["gaussian"](first.source.shape) * 1.2, INPUTS["gaussian"](first.output.shape))
    demand(first.forward == second.forward and first.backward == second.backward, "other bytes after save and load")


def refuses_another_length(name: str, options: Options, device: torch.device = CPU) -> None:
    """Bytes of another length are refused."""
    crossing = let_cross(name, options, device=device)
    receiver = crossing.codecs["forward"][1]
    for slot, spec in enumerate(crossing.specs):
        longer = crossing.forward[slot] + b"\0"
        demand_refusal(lambda: receiver.unpack(slot, longer, spec, "forward"), "bytes where", "a byte too many")  # noqa: B023


def sends_the_bytes_it_declares(name: str, options: Options, device: torch.device = CPU) -> None:
    """Bytes per token are those sent, or at most those where the length is not fixed."""
    crossing = let_cross(name, options, device=device)
    spec = crossing.codec.spec(BATCH, TIME)
    exact = all(tensor.exact for tensor in spec.tensors)
    directions: tuple[tuple[Direction, list[bytes]], ...] = (("forward", crossing.forward), ("backward", crossing.backward))
    for direction, packed in directions:
        sent, declared = sum(map(len, packed)) / (BATCH * TIME), spec.bytes_per_token(direction)
        demand(sent == declared if exact else sent <= declared, f"{sent} bytes per token {direction}, {declared} declared")


def does_not_hide_what_is_not_finite(name: str, options: Options, device: torch.device = CPU) -> None:
    """A value that is not finite is not finite on the other side either, and spoils no other sequence."""
    if name in SILENT:
        return
    codec = build_codec_variant(name, options)
    crossing = Crossing(codec, options.get("step", 0), device=device)
    source = torch.ones(BATCH, TIME, codec.sent_width)
    source[0, 0, 0] = torch.nan
    sent = crossing.exit(source.to(device), crossing.ids, crossing.context)
    sender, receiver = crossing.codecs["forward"]
    packed = [sender.pack(slot, tensor.detach(), "forward") for slot, tensor in enumerate(sent)]
    pairs = enumerate(zip(packed, crossing.specs, strict=True))
    arrived = tuple(receiver.unpack(slot, data, spec, "forward").to(device) for slot, (data, spec) in pairs)
    output = crossing.entry(arrived, crossing.ids, crossing.context)
    demand(output[0, 0].isnan().any(), "nan was hidden")
    demand(output[1:].isfinite().all(), "other sequences were spoilt")


OF_INPUTS = {"form and error": keeps_form_and_error, "gradient": has_a_finite_gradient}
"""Laws that also take the kind of values."""
LAWS: dict[str, Callable[..., None]] = {
    **OF_INPUTS,
    "same bytes": same_seed_same_bytes,
    "state": state_survives_save_and_load,
    "length": refuses_another_length,
    "declared bytes": sends_the_bytes_it_declares,
    "not finite": does_not_hide_what_is_not_finite,
}
