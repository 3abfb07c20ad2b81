"""The control path of a step: loss, gradient norm and stop wish go upstream, their total comes back down and commits the step.

The total rides ahead of the next step's first payload, so clipping by the global norm costs no extra round trip.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, fields
from typing import Any

from thinwire.link.errors import ProtocolError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.link import Link
from thinwire.pipeline.meter import Meter
from thinwire.pipeline.outcome import Outcome


class Control:
    """Talk with the neighbours between the payloads."""

    def __init__(self, left: Link | None, right: Link | None) -> None:
        self.left, self.right = left, right
        self.meter = Meter()

    def settle(self, own: Outcome) -> Outcome:
        """Agree on the outcome of a step; every stage returns the same."""
        outcome = own if self.right is None else own.plus(decode_outcome(self.receive(self.right)))
        if self.left is not None:
            self.send(self.left, asdict(outcome))
            outcome = decode_outcome(self.receive(self.left))
            if outcome.step != own.step:
                raise ProtocolError("step", outcome.step, own.step, "total of another step")
        if self.right is not None:
            self.send(self.right, asdict(outcome))
        return outcome

    def announce(self, facts: dict[str, Any] | None) -> dict[str, Any]:
        """Pass on what stage 0 knows about the run; every stage returns it."""
        if self.left is not None:
            facts = self.receive(self.left)
        assert facts is not None, "only stage 0 makes the facts"
        if self.right is not None:
            self.send(self.right, facts)
        return facts

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Collect what every stage says of itself, first stage first; every stage returns the list."""
        behind = [] if self.right is None else self.receive(self.right)["stages"]
        everyone = {"stages": [own, *behind]}
        if self.left is not None:
            self.send(self.left, everyone)
            everyone = self.receive(self.left)
        if self.right is not None:
            self.send(self.right, everyone)
        return everyone["stages"]

    def send(self, link: Link, message: dict[str, Any]) -> None:
        link.send(Frame.make(Kind.STEP, json.dumps(message).encode(), epoch=link.epoch))

    def receive(self, link: Link) -> dict[str, Any]:
        frame = self._next(link)
        if frame.header.kind is not Kind.STEP:
            raise ProtocolError("kind", frame.header.kind.name, "STEP")
        try:
            message = json.loads(bytes(frame.payload))
        except ValueError as error:
            raise ProtocolError("message", str(error), "JSON") from None
        if not isinstance(message, dict):
            raise ProtocolError("message", type(message).__name__, "an object")
        return message

    def basis_downstream(self, data: bytes | None) -> bytes:
        """Pass the first basis on from stage 0; every stage returns its bytes."""
        return self._relay_basis(data, self.left, self.right)

    def basis_upstream(self, data: bytes | None) -> bytes:
        """Pass a moved basis on from the last stage; every stage returns its bytes."""
        return self._relay_basis(data, self.right, self.left)

    def _relay_basis(self, data: bytes | None, source: Link | None, target: Link | None) -> bytes:
        """Take the basis from one neighbour, unless it was made here, and hand it to the other."""
        if source is not None:
            data = self.receive_tensor(source)
        assert data is not None
        if target is not None:
            self.send_tensor(target, data)
        return data

    def send_tensor(self, link: Link | None, data: bytes) -> None:
        """Send the bytes of a tensor that both sides of a boundary share."""
        assert link is not None
        link.send(Frame.make(Kind.BASIS, data, epoch=link.epoch))

    def receive_tensor(self, link: Link | None) -> bytes:
        """Receive the bytes of such a tensor."""
        assert link is not None
        frame = self._next(link)
        if frame.header.kind is not Kind.BASIS:
            raise ProtocolError("kind", frame.header.kind.name, "BASIS")
        return bytes(frame.payload)

    def _next(self, link: Link) -> Frame:
        """Wait for the next control frame of a neighbour."""
        started = time.perf_counter()
        frame = link.receive(Channel.CONTROL)
        self.meter.wait_seconds += time.perf_counter() - started
        return frame


def decode_outcome(message: dict[str, Any]) -> Outcome:
    """Read an outcome that came over a link, refusing anything else."""
    names = {field.name for field in fields(Outcome)}
    if message.keys() != names:
        raise ProtocolError("outcome", sorted(message), sorted(names))
    numbers = {name: value for name, value in message.items() if name not in ("stop", "loss", "saved", "copied")}
    if type(message["stop"]) is not bool or any(type(value) not in (int, float) for value in numbers.values()):
        raise ProtocolError("outcome", message, "numbers and a stop wish")
    if any(type(value) is int and abs(value) >= 2**63 for value in (*numbers.values(), message["loss"])):
        raise ProtocolError("outcome", sorted(numbers), "numbers that a float can hold")
    if message["loss"] is not None and type(message["loss"]) not in (int, float):
        raise ProtocolError("loss", message["loss"], "a number or null")
    lists = {name: message[name] for name in ("saved", "copied")}
    for name, steps in lists.items():
        if not isinstance(steps, list) or any(type(step) is not int for step in steps):
            raise ProtocolError(name, steps, "a list of steps")
    return Outcome(**message | {name: tuple(steps) for name, steps in lists.items()})
