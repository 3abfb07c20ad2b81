"""Entropy-coded boundaries: predicted, rotated, quantised with one step size for all tokens, and sent in as few bits as that takes.

It stands behind a codec, as `quantize` does, and takes the place of it. The payload is one row: the number of the step size, then the
integer-valued codes; in backward its "gradient" is the row of the quantised gradient, which has a model and a step size of its own. So
both directions lie on the wire's grid, and a transport that does not pack carries the same values. What the ends learn is in
`code_model.py`, how codes become bytes in `bits/entropy.py`.

    bytes    number of the step (2), part of a hash of what the sender has learnt (1), then words of 4 bytes; where these would be no
             shorter, the codes as 16-bit integers
"""

from __future__ import annotations

import math
from copy import copy

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.bits import entropy
from thinwire.bits.ids import decode_ids, encode_ids
from thinwire.bits.ladder import HIGHEST, LOWEST, OCTAVE
from thinwire.bits.raw import Buffer, Direction, TensorSpec, from_raw_bytes, raw_bytes
from thinwire.codecs.aim import STEP_OF_BITS, Aim
from thinwire.codecs.base import Codec, CodecOptions
from thinwire.codecs.code_model import CODES, CodeModel
from thinwire.codecs.id_model import IdModel
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.noise import ROUNDING, sample_keys, uniform
from thinwire.util.device import to_host

HEADER = 3
SETTLED = 32
"""Steps in which a step size settles before the weight of the bits holds the rate."""
UNBOUND = "entropy coding needs what an end has learnt: with_end"
PLAIN = np.dtype("<i2")


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, ids_BT, context, end):
        number, steps = end.statistics.activations.in_steps(values, ids_BT, context)
        ctx.rest = ids_BT, context, end, values.dtype, number
        ctx.save_for_backward(steps if end.rate_penalty else steps.new_zeros(0))
        return end.statistics.activations.quantize(number, steps, ids_BT, context, end.dither(steps, "forward", context))

    @staticmethod
    def backward(ctx, row):
        ids_BT, context, end, dtype, number = ctx.rest
        shape = (*ids_BT.shape, end.statistics.gradients.width)
        noise = end.dither(row.new_empty(shape, dtype=end.statistics.gradients.compute), "backward", context)
        gradient = end.statistics.gradients.dequantize(row, ids_BT, context, noise)
        if end.rate_penalty and context.training:
            # A step size that follows the rate alone lets the network outgrow it: whoever writes larger values gets them through.
            gradient = gradient + end.penalty() * end.statistics.activations.slope(number, *ctx.saved_tensors)
        return gradient.to(dtype), None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, row, ids_BT, context, end):
        ctx.rest = ids_BT, context, end
        shape = (*ids_BT.shape, end.statistics.activations.width)
        noise = end.dither(row.new_empty(shape, dtype=end.statistics.activations.compute), "forward", context)
        return end.statistics.activations.dequantize(row, ids_BT, context, noise)

    @staticmethod
    def backward(ctx, gradient):
        ids_BT, context, end = ctx.rest
        number, steps = end.statistics.gradients.in_steps(gradient, ids_BT, context)
        noise = end.dither(steps, "backward", context)
        if end.stochastic and noise is None:
            noise = end.noise(steps.shape, context).to(steps.dtype)
        if end.sample and noise is None:
            steps = sampled(steps, end.sample, end.noise(ids_BT.shape, context).to(steps.dtype))
        return end.statistics.gradients.quantize(number, steps, ids_BT, context, noise), None, None, None


class Statistics(nn.Module):
    """What both ends have learnt of what crosses: a model of each direction's codes, and one of the ids."""

    def __init__(self, activations: CodeModel, gradients: CodeModel, ids: IdModel) -> None:
        super().__init__()
        self.activations, self.gradients, self.ids = activations, gradients, ids

    def of(self, direction: Direction) -> CodeModel:
        return self.activations if direction == "forward" else self.gradients


class EntropyEnd(nn.Module):
    """What exit and entry have in common; the name of the part is what checkpoints know it by (`model/names.py`)."""

    def __init__(self, statistics: Statistics, options: CodecOptions, layer: int, seed: int) -> None:
        super().__init__()
        self.statistics = statistics
        self.dithered: dict[Direction, bool] = {way: options.dither in (way, "both") for way in ("forward", "backward")}
        self.layer, self.seed = layer, seed

    def dither(self, values: Tensor, way: Direction, context: Context) -> Tensor | None:
        """Draw the noise in [0, 1) that both ends add and take away, if they do, in the form of `values`."""
        if not (self.dithered[way] and context.training):
            return None
        keys_B = sample_keys(context.samples_B, ROUNDING, self.seed, context.step, self.layer, 1 if way == "forward" else 2)
        return uniform(keys_B, tuple(values.shape)).to(values.dtype)


class EntropyExit(EntropyEnd):
    """Turn values into a row of codes."""

    def __init__(self, statistics: Statistics, options: CodecOptions, layer: int, seed: int) -> None:
        super().__init__(statistics, options, layer, seed)
        self.rate_penalty = options.rate_penalty

    def penalty(self) -> float:
        """Return what a bit counts in the loss."""
        weight = self.statistics.activations.weight
        return self.rate_penalty if weight is None else self.rate_penalty * 2 ** (int(weight) / OCTAVE)

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        self.statistics.ids.see(ids_BT, context)
        return (_Send.apply(stream, ids_BT, context, self),)

    def figures(self) -> dict[str, float]:
        """Return the bits per value of the last step, and their weight where that is steered."""
        found = {"forward_rate": self.statistics.activations.rate} if self.statistics.activations.rate >= 0 else {}
        return found | ({"rate_penalty": self.penalty()} if self.statistics.activations.weight is not None else {})


class EntropyEntry(EntropyEnd):
    """Turn a row of codes back into values; quantise the gradient on its way out."""

    def __init__(self, statistics: Statistics, options: CodecOptions, layer: int, seed: int) -> None:
        super().__init__(statistics, options, layer, seed)
        self.stochastic, self.sample = options.rounding == "stochastic", options.sample

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        self.statistics.ids.see(ids_BT, context)
        return _Receive.apply(payload[0], ids_BT, context, self)

    def noise(self, shape: torch.Size, context: Context) -> Tensor:
        """Draw numbers in [0, 1) for a microbatch's gradient."""
        return uniform(sample_keys(context.samples_B, ROUNDING, self.seed, context.step, self.layer), tuple(shape))

    def figures(self) -> dict[str, float]:
        """Return the bits per value of the last step's gradient."""
        return {"backward_rate": self.statistics.gradients.rate} if self.statistics.gradients.rate >= 0 else {}


def sampled(steps_BTK: Tensor, limit: float, noise_BT: Tensor) -> Tensor:
    """Leave tokens out whose gradient is shorter than `limit` steps, and lengthen the others of these so that the mean stays.

    A dead zone would drop the many small gradients of well predicted tokens, which together balance the few large ones.
    """
    chance_BT1 = (steps_BTK.norm(dim=-1, keepdim=True) / limit).clamp_max(1.0)
    kept = noise_BT.unsqueeze(-1) < chance_BT1
    return torch.where(kept | ~chance_BT1.isfinite(), steps_BTK / chance_BT1, 0.0)


class Entropy(Codec):
    """Send what a codec in front of it sends, entropy-coded."""

    exact_ids = False
    end: EntropyEnd | None = None
    """The one that packs and unpacks with this codec."""

    def __init__(
        self, options: CodecOptions, model: ModelConfig, width: int, *, seed: int = 0, compute: torch.dtype = torch.float32
    ) -> None:
        """Stand behind a codec that sends `width` channels."""
        super().__init__(options, model, seed=seed, compute=compute)
        check_options(options)
        self.channels = width
        same = options.backward_rate is None and options.backward_bits is None
        backward = Aim(options.rate, options.bits) if same else Aim(options.backward_rate, options.backward_bits)
        settled = SETTLED if options.steer == "penalty" else None  # gradients are not in the loss: their step size is steered
        self.aims: dict[Direction, Aim] = {"forward": Aim(options.rate, options.bits, settled), "backward": backward}
        self.factors = boundary_factors(options.boundary_rates)

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        entry = exit = None
        if not plan.first:
            entry = EntropyEntry(self._statistics(plan.index - 1), self.options, plan.layers.start, self.seed)
        if not plan.last:
            exit = EntropyExit(self._statistics(plan.index), self.options, plan.layers.stop, self.seed)
        return entry, exit

    def _statistics(self, boundary: int) -> Statistics:
        """Make what one end learns; gradients are not predicted, for the error of a prediction that is added back is a bias."""
        zone, compute, vocabulary = self.options.dead_zone, self.compute, self.model.vocabulary
        factor = self.factors[min(boundary, len(self.factors) - 1)]
        forward, backward = (self.aims[way].times(factor) for way in ("forward", "backward"))
        activations = CodeModel(self.channels, vocabulary, forward, zone, compute)
        return Statistics(activations, CodeModel(self.channels, 0, backward, zone, compute), IdModel(vocabulary))

    def with_end(self, end: nn.Module) -> Codec:
        assert isinstance(end, EntropyEnd)
        found = copy(self)
        found.end = end
        return found

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        count = math.prod(source.shape)
        most = HEADER + PLAIN.itemsize * count
        return (TensorSpec((count + 1,), CODES, most, most, exact=False, usual=self.aims["forward"].usual / 16),)

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        assert self.end is not None, UNBOUND
        coding = self.end.statistics.of(direction).coding()
        row = to_host(tensor.detach()).to(torch.int64).numpy()
        number, codes_NK = int(row[0]), row[1:].reshape(-1, self.channels)
        head = number.to_bytes(2, "little", signed=True) + bytes([coding.check])
        data = entropy.encode_codes(codes_NK, coding.at(number), coding.tables)
        plain = PLAIN.itemsize * codes_NK.size
        return head + (data if len(data) < plain else codes_NK.astype(PLAIN).tobytes())

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        assert self.end is not None, UNBOUND
        coding, view, most = self.end.statistics.of(direction).coding(), memoryview(data), spec.size(direction)
        if not HEADER < len(view) <= most:
            raise ValueError(f"payload of {len(view)} bytes where {HEADER + 1} to {most} were declared for {spec.shape} codes")
        number, body = int.from_bytes(view[:2], "little", signed=True), view[HEADER:]
        if not LOWEST <= number <= HIGHEST:
            raise ValueError(f"payload with step number {number} where {LOWEST} to {HIGHEST} are possible")
        if view[2] != coding.check:
            raise ValueError("a payload was coded with other statistics than those of this end; the stages have lost step")
        if len(view) == most:
            codes_NK = np.frombuffer(body, PLAIN).astype(np.int64)
        else:
            codes_NK = entropy.decode_codes(body, (spec.shape[0] - 1) // self.channels, coding.at(number), coding.tables)
        return torch.from_numpy(np.concatenate(([number], codes_NK.ravel()))).to(spec.dtype)

    def pack_ids(self, ids: Tensor) -> bytes:
        assert self.end is not None, UNBOUND
        here = to_host(ids)
        data, plain = encode_ids(here.to(torch.int64).numpy(), self.end.statistics.ids.table()), raw_bytes(here)
        return data if len(data) < len(plain) else plain

    def unpack_ids(self, data: Buffer, spec: TensorSpec) -> Tensor:
        assert self.end is not None, UNBOUND
        if len(data) >= spec.forward_bytes:
            return from_raw_bytes(data, spec)
        ids = decode_ids(data, math.prod(spec.shape), self.end.statistics.ids.table())
        return torch.from_numpy(ids).to(spec.dtype).view(spec.shape)

    def error_bound(self, source: Tensor) -> None:
        """State no bound: a step size that was steered to a rate may be any."""


def boundary_factors(text: str | None) -> list[float]:
    """Read factors of the rate by boundary."""
    if text is None:
        return [1.0]
    try:
        found = [float(part) for part in text.split("/")]
    except ValueError:
        found = []
    if not found or not all(0.05 <= factor <= 20 for factor in found):
        raise ValueError(f"codec.boundary_rates is {text!r}; write factors of 0.05 to 20 with slashes between them, such as 1.2/1/0.8")
    return found


def check_options(options: CodecOptions) -> None:
    """Refuse options that say nothing sensible together."""
    if options.rate is None and options.bits is None:
        raise ValueError("codec.entropy needs codec.rate, the bits per value to hold, or codec.bits, whose error to keep; set one of them")
    for name in ("rate", "backward_rate"):
        value = getattr(options, name)
        if value is not None and not 0.05 <= value <= 12:
            raise ValueError(f"codec.{name} is {value}; choose 0.05 to 12 bits per value, such as 1.5")
    for name, other in (("rate", "bits"), ("backward_rate", "backward_bits")):
        if getattr(options, name) is not None and getattr(options, other) is not None:
            raise ValueError(f"codec.{name} and codec.{other} both say how fine to quantise; leave one of them out")
    for name, idle in (("boundary_rates", None), ("steer", "step")):
        if options.rate is None and getattr(options, name) != idle:
            raise ValueError(f"codec.{name} is {getattr(options, name)}, but no rate is held; set codec.rate, or leave codec.{name} out")
    if options.steer == "penalty" and not options.rate_penalty:
        raise ValueError("codec.steer is penalty, and codec.rate_penalty, which its weight begins with, is 0; leave one of them out")
    for name in ("bits", "backward_bits"):
        value = getattr(options, name)
        if value is not None and value not in STEP_OF_BITS:
            raise ValueError(f"codec.{name} is {value}; it can be {', '.join(map(str, STEP_OF_BITS))}")
    for name, most in (("rate_penalty", 1.0), ("sample", 100.0)):
        if not 0 <= getattr(options, name) <= most:
            raise ValueError(f"codec.{name} is {getattr(options, name)}; choose 0 (off) to {most:g}; the default suits most runs")
    if not 0.5 <= options.dead_zone <= 1:
        raise ValueError(f"codec.dead_zone is {options.dead_zone}; choose 0.5 (round to the nearest) to 1, such as 0.6")
