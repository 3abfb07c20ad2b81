"""The codec seam: what a boundary method must say about itself, in the graph and in bytes.

*In the graph* `ends` gives a stage the two modules that turn its stream into a payload and back, and `stream` says how its blocks read
and write the residual stream. *In bytes* `pack` and `unpack` put one payload tensor on the wire and take it off again, bit for bit.
No sockets and no distributed code here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.bits.raw import Buffer, Direction, TensorSpec, from_raw_bytes, raw_bytes
from thinwire.config.sections import Dtype, ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.stream import Stream

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class CodecOptions:
    """Options every codec has."""

    name: str
    """Name in the registry."""
    dtype: Dtype = "bf16"
    """Number format of unquantised values on the wire."""
    bits: int | None = None
    """Quantise the payload to this many bits (8, 4, 3, 2 or 1); unset: send `dtype`."""
    backward_bits: int | None = None
    """Bits of the gradient on its way back; unset: as many as `bits`."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How a quantised gradient is rounded; `stochastic` is right on average."""
    entropy: bool = False
    """Predict, quantise with one step size for all tokens, and entropy-code; needs `rate` or `bits`, whose error it then keeps."""
    rate: float | None = None
    """Bits per value that entropy-coded payloads take on average: the step size follows."""
    backward_rate: float | None = None
    """The same for the gradient on its way back; unset: as `rate`."""
    dead_zone: float = 0.6
    """Share of a step, 0.5 to 1, below which an entropy-coded value is sent as the predicted one; 0.5 rounds to the nearest."""
    rate_penalty: float = 1.5e-3
    """What a bit of an entropy-coded payload counts in the loss, in nats: keeps the network from writing ever larger values; 0: nothing."""
    sample: float = 3.0
    """Entropy-coded gradients of tokens shorter than so many steps are sent now and then, and lengthened: right on average; 0: rounded."""
    boundary_rates: str | None = None
    """Factors of `rate` and `backward_rate` at the boundaries from first to last, such as 1.2/1/0.8; the last holds for those behind."""
    dither: Literal["none", "forward", "backward", "both"] = "none"
    """Add noise that both ends draw before entropy-coded values are rounded, and take it away after: an error that depends on nothing."""
    steer: Literal["step", "penalty"] = "step"
    """What holds the rate: the step size, or from step 33 on the weight of the bits in the loss, which begins with `rate_penalty`."""


@dataclass(frozen=True, kw_only=True)
class LossyOptions(CodecOptions):
    """Options of codecs that can be left off for a while or at some boundaries: the layers around them stay as they are."""

    warmup: int = 0
    """Steps at the start during which the stream crosses uncompressed."""
    from_layer: int = 0
    """Boundaries in front of this layer or a later one are compressed; earlier ones send the stream as it is."""


@dataclass(frozen=True)
class WireSpec:
    """Everything a codec puts on the wire for one microbatch at one boundary."""

    tokens: int
    tensors: tuple[TensorSpec, ...]

    def bytes_per_token(self, direction: Direction) -> float:
        """Return the most that a token takes."""
        return sum(spec.size(direction) for spec in self.tensors) / self.tokens

    def usual_bytes_per_token(self, direction: Direction) -> float:
        """Return what a token usually takes: what a schedule reckons with."""
        return sum(spec.size(direction) * spec.usual for spec in self.tensors) / self.tokens


class CastExit(nn.Module):
    """Send the stream as it is, in the wire's number format."""

    def __init__(self, wire: torch.dtype) -> None:
        super().__init__()
        self.wire = wire

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        return (stream.to(self.wire),)


class CastEntry(nn.Module):
    """Take the stream back in the compute format; its gradient leaves in the wire's."""

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        return payload[0].to(self.compute)


class Codec:
    """A boundary method. The defaults send the stream itself; override what differs."""

    Options: type[CodecOptions] = CodecOptions
    constrains = False
    """Whether all but the free layers of the model are bound by this codec."""
    integer_slots: frozenset[int] = frozenset()
    """Payload tensors that hold positions, masks or factors without a gradient: a codec chained behind leaves them as they are."""
    depends_on_microbatch = False
    """Whether what is sent of a sample depends on the others of its microbatch."""
    by_token = True
    """Whether a token's payload depends on that token alone, so that text can be written token by token."""
    exact_ids = True
    """Whether the ids that ride forward always take the same bytes, or any number up to them."""
    owns_bits = False
    """Whether `bits` is this codec's own affair; otherwise `quantize` is chained behind it where bits are given."""

    def __init__(self, options: CodecOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        self.options = options
        self.model = model
        self.seed = seed
        self.compute = compute
        """Format of the stream inside a stage."""
        self.wire_dtype = DTYPES[options.dtype]
        """Format of plain values on the wire; a codec that is chained hands on `compute` instead."""

    @property
    def width(self) -> int:
        """Width of the residual stream that blocks write into and boundaries cut."""
        return self.model.width

    @property
    def sent_width(self) -> int:
        """Width of the stream that reaches an exit: less than `width` where the last block of a stage writes only so many channels."""
        return self.width

    def at(self, layer: int) -> Codec:
        """Return the codec of the boundary in front of a layer: this one, unless boundaries differ."""
        return self

    def stream(self, plan: StagePlan) -> Stream:
        """Make the module that tells a stage's blocks how to read the stream."""
        return Stream()

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        """Make the entry and exit modules of a stage; the first has no entry, the last no exit."""
        entry = None if plan.first else CastEntry(self.compute)
        exit = None if plan.last else CastExit(self.wire_dtype)
        return entry, exit

    def moves_after(self, step: int) -> bool:
        """Tell whether all stages go over to a new basis between this step and the next."""
        return False

    def shares_after(self, step: int) -> bool:
        """Tell whether `Shared` parameters are updated between this step and the next."""
        return False

    def propose_basis(self, last: Stream) -> Tensor:
        """Return the new basis as the last stage's stream sees it."""
        raise AssertionError("this codec has no basis to move")

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        """Describe the payload made from a stream tensor of the given form."""
        return (TensorSpec.raw(source.shape, self.wire_dtype),)

    def spec(self, batch: int, time: int) -> WireSpec:
        """Describe the payload of a microbatch of `batch` sequences of `time` tokens."""
        source = TensorSpec.raw((batch, time, self.sent_width), self.compute)
        return WireSpec(batch * time, self.wire(source))

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        """Put payload tensor number `slot`, or its gradient, into bytes."""
        return raw_bytes(tensor)

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        """Take the tensor out of `pack`'s bytes, bit for bit."""
        return from_raw_bytes(data, spec)

    def pack_ids(self, ids: Tensor) -> bytes:
        """Put the ids that ride forward into bytes."""
        return raw_bytes(ids)

    def unpack_ids(self, data: Buffer, spec: TensorSpec) -> Tensor:
        """Take the ids out of `pack_ids`'s bytes."""
        return from_raw_bytes(data, spec)

    def with_end(self, end: nn.Module) -> Codec:
        """Return the codec as one end of a boundary packs and unpacks with it: this one, unless that depends on what the end has learnt."""
        return self

    def error_bound(self, source: Tensor) -> Tensor | None:
        """Bound |received - sent| for each element of a stream tensor; None where the network learns what to send."""
        # Round to nearest: half a unit in the last place, plus the smallest normal number for values that flush to zero.
        limits = torch.finfo(self.wire_dtype)
        return source.abs() * (limits.eps / 2) + limits.tiny


def check_width(name: str, value: int, model: ModelConfig) -> None:
    """Refuse a number of channels, given as the option `name`, that the stream does not have."""
    if not 1 <= value <= model.width:
        raise ValueError(f"codec.{name} is {value}; it can be 1 to the model width, {model.width}")


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, source):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None, None


class _Absorb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, result, *unused):
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in unused]
        return result.view_as(result)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms)


def attach(tensor: Tensor, source: Tensor) -> Tensor:
    """Make a payload tensor that has no gradient (positions, a mask) a result of `source`, as pipeline engines demand of all they send."""
    return _Attach.apply(tensor, source)


def absorb(result: Tensor, *unused: Tensor) -> Tensor:
    """Return `result` and give the payload tensors that did not shape it a gradient of zeros, for the same reason."""
    return _Absorb.apply(result, *unused)
