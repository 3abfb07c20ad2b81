"""The static contract: what each direction may carry, in which order and how long. Both ends derive it from the same config.

A `Cursor` walks one direction. The receiver checks with it before it takes memory, the sender before it queues a frame. Sequence
numbers and parts are not its business (`inbox.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.link.errors import ProtocolError
from thinwire.link.frame import EPOCHS, MAX_DIMS, PART_BYTES, Channel, Header, Kind

LIMITS: dict[Kind, int] = {
    Kind.HELLO: 2**18,
    Kind.STEP: 2**12,
    Kind.BASIS: 2**26,
    Kind.SNAPSHOT: 2**26,
    Kind.ACK: 2**8,
    Kind.PING: PART_BYTES,
    Kind.PONG: 2**6,
    Kind.ABORT: 2**12,
    Kind.VOTE: 2**16,
    Kind.BYE: 0,
}
"""Most payload bytes of each kind whose form is not in the flow."""


@dataclass(frozen=True)
class TensorForm:
    """One tensor of a payload."""

    dtype: int
    dims: tuple[int, ...]
    max_bytes: int
    exact: bool = True
    """Whether it always has `max_bytes`, or any number up to them."""

    def __post_init__(self) -> None:
        if len(self.dims) > MAX_DIMS:
            raise ValueError(f"a tensor of {len(self.dims)} dimensions does not fit a frame header, which has {MAX_DIMS}; flatten it")


@dataclass(frozen=True)
class Phase:
    """From `first_step` on, each step has so many microbatches of these tensors."""

    first_step: int
    tensors: tuple[TensorForm, ...]
    microbatches: int


@dataclass(frozen=True)
class Flow:
    """The DATA frames of one direction on the boundary channel, in the order (step, microbatch, tensor). No phase: none are expected."""

    phases: tuple[Phase, ...] = ()
    consecutive: bool = True
    """Whether every step must appear, or later ones may follow (a direction that rests during validation)."""

    @classmethod
    def constant(cls, tensors: tuple[TensorForm, ...], microbatches: int, first_step: int = 0, *, consecutive: bool = True) -> Flow:
        """Describe a direction whose form never changes."""
        return cls((Phase(first_step, tensors, microbatches),), consecutive)

    def phase(self, step: int) -> Phase | None:
        """Return the phase a step falls in."""
        return next((phase for phase in reversed(self.phases) if phase.first_step <= step), None)


@dataclass(frozen=True)
class Contract:
    """Everything one end may send and receive."""

    outgoing: Flow = field(default_factory=Flow)
    incoming: Flow = field(default_factory=Flow)
    epoch: int = 0
    basis_version: int = 0
    """Version of the basis at the first step."""
    exchange_bytes: int = 0
    """Most bytes of a DATA frame on the exchange channel; 0: none are expected."""
    limits: Mapping[Kind, int] = field(default_factory=dict)
    """Limits that differ from `LIMITS`."""

    def __post_init__(self) -> None:
        if not 0 <= self.epoch < EPOCHS:
            raise ValueError(f"epoch {self.epoch} is not from 0 to {EPOCHS - 1}; start all workers again, with --resume")

    def mirrored(self) -> Contract:
        """Return the other end's contract."""
        return Contract(self.incoming, self.outgoing, self.epoch, self.basis_version, self.exchange_bytes, self.limits)

    def limit(self, header: Header) -> int:
        """Return the most bytes of a frame that is no boundary payload."""
        if header.kind is Kind.DATA:
            return self.exchange_bytes
        return self.limits.get(header.kind, LIMITS[header.kind])

    def check_unsequenced(self, header: Header) -> None:
        """Refuse a frame of the link itself that is too long, numbered or in parts."""
        limit = self.limit(header)
        if header.total > limit:
            raise ProtocolError("length", header.total, f"at most {limit} bytes for {header.kind.name}")
        if header.sequence or header.offset or header.length != header.total:
            raise ProtocolError("sequence", header.sequence, f"0, in one part, for {header.kind.name}")


class Cursor:
    """Where one direction stands."""

    def __init__(self, flow: Flow, contract: Contract) -> None:
        self.flow = flow
        self.contract = contract
        self.step = flow.phases[0].first_step if flow.phases else 0
        self.microbatch = 0
        self.tensor = 0
        self.basis_version = contract.basis_version

    def check(self, header: Header) -> None:
        """Refuse by name a frame that is not the next one; the header is that of a whole frame or its first part."""
        if header.epoch != self.contract.epoch:
            raise ProtocolError("epoch", header.epoch, self.contract.epoch)
        if header.kind is Kind.DATA and header.channel is Channel.BOUNDARY:
            self._check_order(header)
            self._check_form(header)
        elif header.total > (limit := self.contract.limit(header)):
            raise ProtocolError("length", header.total, f"at most {limit} bytes for {header.kind.name}")

    def advance(self, header: Header) -> None:
        """Step over a frame that was checked."""
        if header.kind is not Kind.DATA or header.channel is not Channel.BOUNDARY:
            return
        phase = self.flow.phase(header.step)
        assert phase is not None
        self.step, self.microbatch, self.tensor = header.step, header.microbatch, header.tensor + 1
        self.basis_version = header.basis_version
        if self.tensor == len(phase.tensors):
            self.tensor, self.microbatch = 0, self.microbatch + 1
        if self.microbatch == phase.microbatches:
            self.microbatch, self.step = 0, self.step + 1

    @property
    def _between_steps(self) -> bool:
        return self.microbatch == 0 and self.tensor == 0

    def _check_order(self, header: Header) -> None:
        if not self.flow.phases:
            raise ProtocolError("kind", "DATA", "no boundary payload in this direction")
        found = (header.step, header.microbatch, header.tensor)
        expected = (self.step, self.microbatch, self.tensor)
        later = not self.flow.consecutive and self._between_steps and header.step > self.step
        if found == expected or (later and found[1:] == (0, 0)):
            return
        note = "repeated" if found < expected else "reordered, or one before it is missing"
        for name, value, wanted in zip(("step", "microbatch", "tensor"), found, expected, strict=True):
            if value != wanted and not (name == "step" and later):
                raise ProtocolError(name, value, wanted, note)

    def _check_form(self, header: Header) -> None:
        phase = self.flow.phase(header.step)
        if phase is None:
            raise ProtocolError("step", header.step, f"at least {self.flow.phases[0].first_step}")
        form = phase.tensors[header.tensor]
        where = f"step {header.step}, microbatch {header.microbatch}, tensor {header.tensor}"
        if header.dtype != form.dtype:
            raise ProtocolError("dtype", header.dtype, form.dtype, where)
        if header.dims != form.dims:
            raise ProtocolError("dims", header.dims, form.dims, where)
        if header.total > form.max_bytes or (form.exact and header.total < form.max_bytes):
            raise ProtocolError("length", header.total, f"{'exactly' if form.exact else 'at most'} {form.max_bytes} bytes", where)
        if header.basis_version < self.basis_version or (header.basis_version > self.basis_version and not self._between_steps):
            raise ProtocolError("basis_version", header.basis_version, self.basis_version, f"{where}; it changes between steps, upwards")
