"""The control path of a step: loss, gradient norm and stop wish go upstream, their total comes back down and commits the step.

The total rides ahead of the next step's first payload, so clipping by the global norm costs no extra round trip. With replicas the first
stages are joined in a tree with replica 0 at its root, and all that all workers agree on passes there.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any, NoReturn

from thinwire.link.errors import ProtocolError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.link import Link
from thinwire.link.message import ANY, FLAG, Form, decode_message, fields, list_of, number, optional, pair, whole
from thinwire.pipeline import forms
from thinwire.pipeline.meter import Meter
from thinwire.pipeline.outcome import Outcome
from thinwire.replicas.graph import make_graph
from thinwire.replicas.peers import Peers

MOST_WORKERS = 2**20


@dataclass(frozen=True)
class Tree:
    """The first stages of other replicas: the one nearer to replica 0, and those behind this one, by number."""

    parent: Link | None = None
    children: Mapping[int, Link] = field(default_factory=dict)


class Control:
    """Talk with the neighbours between the payloads."""

    def __init__(
        self,
        left: Link | None,
        right: Link | None,
        tree: Tree | None = None,
        replica: int = 0,
        *,
        number: int = 0,
        workers: int | None = None,
        peers: Peers | None = None,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """Talk with the neighbours of a stage; the first stages of several replicas also talk with each other.

        This is worker `number` of so many (None: of any number), with these copies of its stage. `abandon` fails the links, and with them
        whatever this worker and the others wait for.
        """
        self.left, self.right, self.tree, self.replica = left, right, tree or Tree(), replica
        self.number, self.workers, self.peers, self.abandon = number, workers, peers or Peers(0, make_graph("complete", 1), {}), abandon
        self.meter = Meter()

    def settle(self, own: Outcome, *, meeting: bool = True, alike: bool = False) -> Outcome:
        """Agree on the outcome of a step; every stage returns the same, and so does every replica where they meet.

        Each applies the norm of its own gradients, unless these are `alike`: then rounding must not part them, and one norm is everyone's.
        """
        outcome = own if self.right is None else own.plus(self._outcome(self.right))
        if self.left is not None:
            self.send(self.left, asdict(outcome))
            outcome = self._outcome(self.left)
        else:
            total = self._settle_replicas(outcome) if meeting else outcome.alone()
            outcome = total if alike else total.of_replica(outcome)
        if outcome.step != own.step:
            refuse(self.left or self.right, ProtocolError("step", outcome.step, own.step, "total of another step"))
        if self.right is not None:
            self.send(self.right, asdict(outcome))
        return outcome

    def _settle_replicas(self, own: Outcome) -> Outcome:
        """Agree with the other first stages."""
        outcome = own
        for child in self.tree.children.values():
            outcome = outcome.beside(self._outcome(child))
        if self.tree.parent is not None:
            self.send(self.tree.parent, asdict(outcome))
            outcome = self._outcome(self.tree.parent)
        for child in self.tree.children.values():
            self.send(child, asdict(outcome))
        return outcome

    def announce(self, facts: dict[str, Any] | None, form: Form = ANY) -> dict[str, Any]:
        """Pass on what stage 0 of replica 0 knows about the run; everyone returns it."""
        if self._above is not None:
            facts = self.receive(self._above, form, "facts")
        assert facts is not None, "only a first stage makes the facts"
        for link in self._below:
            self.send(link, facts)
        return facts

    def gather(self, own: Any, form: Form = ANY) -> list[Any]:
        """Collect what every worker says of itself, replica by replica, first stage first; everyone returns the list."""
        workers: list[Any] = [[self.replica, own]]
        for link in (self.right, *self.tree.children.values()):
            workers += [] if link is None else self._workers(link, form)
        everyone = {"workers": sorted(workers, key=itemgetter(0))}  # stages are in order, and stay so
        if self._above is not None:
            self.send(self._above, everyone)
            everyone = {"workers": self._workers(self._above, form)}
        sizes = Counter(replica for replica, _ in everyone["workers"])
        if [*sizes] != [*range(len(sizes))] or len({*sizes.values()}) != 1:
            refuse(self._above or self.right, ProtocolError("workers", dict(sizes), "as many of each replica, in order"))
        if self.workers not in (None, len(everyone["workers"])):
            refuse(self._above or self.right, ProtocolError("workers", len(everyone["workers"]), self.workers))
        said = [part for _, part in everyone["workers"]]
        for link in self._below:
            self.send(link, everyone)
        return said

    def _workers(self, link: Link, form: Form) -> list[Any]:
        """Receive what workers say of themselves, each with its replica."""
        workers: list[Any] = self.receive(link, EVERYONE)["workers"]
        try:
            for index, (_, said) in enumerate(workers):
                form.check(said, f"message.workers[{index}][1]")
        except ProtocolError as error:
            refuse(link, error)
        return workers

    @property
    def _above(self) -> Link | None:
        """Return the neighbour on the way to stage 0 of replica 0."""
        return self.tree.parent if self.left is None else self.left

    @property
    def _below(self) -> list[Link]:
        """Return the neighbours whose way there leads through this worker."""
        return [*self.tree.children.values(), *([] if self.right is None else [self.right])]

    def send(self, link: Link, message: dict[str, Any]) -> None:
        link.send(Frame.make(Kind.STEP, json.dumps(message).encode(), epoch=link.epoch))

    def receive(self, link: Link, form: Form = ANY, what: str = "message") -> dict[str, Any]:
        """Return a message; one that does not have its form fails the link, and so is known by name at both ends."""
        frame = self._next(link)
        try:
            if frame.header.kind is not Kind.STEP:
                raise ProtocolError("kind", frame.header.kind.name, "STEP")
            message = decode_message(frame.payload)
            form.check(message, what)
        except ProtocolError as error:
            refuse(link, error)
        return message

    def _outcome(self, link: Link) -> Outcome:
        """Receive an outcome."""
        return _outcome_of(self.receive(link, OUTCOME, "outcome"))

    def basis_downstream(self, data: bytes | None) -> bytes:
        """Pass the first basis on from stage 0 of replica 0; everyone returns its bytes."""
        if self._above is not None:
            data = self.receive_tensor(self._above)
        assert data is not None
        for link in self._below:
            self.send_tensor(link, data)
        return data

    def basis_upstream(self, data: bytes | None) -> bytes:
        """Pass a moved basis on from the last stage of replica 0; everyone returns its bytes.

        In other replicas it comes down from the first stage: what they would have proposed themselves differs.
        """
        if self.replica:
            return self.basis_downstream(None)
        if self.right is not None:
            data = self.receive_tensor(self.right)
        assert data is not None
        for link in (self.left, *self.tree.children.values()):
            if link is not None:
                self.send_tensor(link, data)
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
            refuse(link, ProtocolError("kind", frame.header.kind.name, "BASIS"))
        return bytes(frame.payload)

    def _next(self, link: Link) -> Frame:
        """Wait for the next control frame of a neighbour."""
        started = time.perf_counter()
        frame = link.receive(Channel.CONTROL)
        self.meter.wait_seconds += time.perf_counter() - started
        return frame


def refuse(link: Link | None, error: ProtocolError) -> NoReturn:
    """Raise what is wrong with a neighbour's message, and tell the neighbour."""
    if link is not None:
        link.abort(str(error), error.code)
        error = error.sent_by(link.peer)
    raise error from None


FIELDS = {
    "step": forms.STEP,
    "loss": optional(number()),
    "squared_norm": number(),
    "stop": FLAG,
    "turn_seconds": forms.SECONDS,
    "delay_seconds": forms.SECONDS,
    "saved": forms.STEPS,
    "copied": forms.STEPS,
    "uncopied": forms.STEPS,
    "save": FLAG,
    "replicas": whole(1, MOST_WORKERS),
    "stopper": whole(-1, MOST_WORKERS),
    "timed_out": FLAG,
}
EVERYONE = fields({"workers": list_of(pair(whole(0, MOST_WORKERS)), MOST_WORKERS)})
"""What workers say of themselves, each with the number of its replica."""
OUTCOME = fields(FIELDS)
"""The form of an outcome. A loss or a norm that is no number is for training to judge: it has diverged."""


def decode_outcome(message: dict[str, Any]) -> Outcome:
    """Read an outcome that came over a link, refusing anything else."""
    OUTCOME.check(message, "outcome")
    return _outcome_of(message)


def _outcome_of(message: dict[str, Any]) -> Outcome:
    """Make an outcome from a message of its form."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in message.items()}
    return Outcome(**values)
