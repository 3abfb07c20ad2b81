"""What the training loop needs of a pipeline, in three protocols: who computes, who agrees, who keeps copies of checkpoints.

In one process: `pipeline/inprocess.py` and `pipeline/alone.py`, and no backups. In a worker: `pipeline/worker.py` and `pipeline/control.py`
over opened links, and `cluster/backups.py`. All calls are collective: every process of the run makes the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.link.message import ANY, Form
from thinwire.model.stage import Stage
from thinwire.pipeline.outcome import Outcome
from thinwire.replicas.peers import Peers


class Abandoned(Exception):
    """The step under way is given up: what was committed before it is what counts."""


class Compute(Protocol):
    """The stages of this process, and what they send to each other and to those of other processes."""

    stages: list[Stage]
    codec: Codec
    microbatch: int
    """Sequences of a microbatch."""
    in_flight: list[int]
    """Microbatches that each stage of the replica wants in flight."""

    def step(self, batch_BT1: Tensor | None, step: int, first_sample: int) -> float | None:
        """Accumulate the gradients of a batch's mean loss; return that loss where the last stage is, else None.

        The first stage is given the batch, the others None. Parameters stay as they are. Counting for `figures` begins anew.
        """
        ...

    def evaluate(self, batch_BT1: Tensor | None, rows: int, step: int = 0) -> float | None:
        """Return the mean loss of `rows` sequences after so many steps where the last stage is, else None; nothing is learnt or counted."""
        ...

    def update_shared(self, step: int, rate_factor: float) -> list[Tensor]:
        """Change alike what stages share where the codec does so after this step; return each stage's rotation to a new basis, if any.

        All stages share the basis, both sides of a boundary some parameters, whose gradients are dropped.
        """
        ...

    def bound_in_flight(self, limits: Sequence[int] | None) -> list[int]:
        """Agree with all stages on the microbatches in flight, at most so many on those of this process; return what each keeps."""
        ...

    def figures(self, seconds: float) -> dict[str, float]:
        """Return what there is to tell of the last step, which took so long: seconds of each kind, bytes, what codecs have measured."""
        ...

    def totals(self) -> list[dict[str, Any]]:
        """Return for each of these stages the counts of the boundary behind it, the meters of its links and the bytes of its exchange."""
        ...


class Group(Protocol):
    """All processes of a run, as one of them sees them: alone, or over links."""

    number: int
    """Of this process among all; replica by replica, first stage first."""
    replica: int
    peers: Peers
    """The copies of this stage in other replicas."""

    def settle(self, own: Outcome, *, meeting: bool = True, alike: bool = False) -> Outcome:
        """Agree on the outcome of a step; every stage returns the same, and so does every replica where they are `meeting`.

        Whoever returns knows that every stage has its gradients of the step. Each replica gets the norm of its own gradients, unless
        these are `alike`.
        """
        ...

    def announce(self, facts: dict[str, Any] | None, form: Form = ANY) -> dict[str, Any]:
        """Return what stage 0 of replica 0 knows; first stages give their facts, the others None. What has another form is refused."""
        ...

    def gather(self, own: Any, form: Form = ANY) -> list[Any]:
        """Return what every process says, in the order of their numbers; it is everywhere the same list."""
        ...

    def abandon(self) -> None:
        """Make whoever computes, or waits for another, give up at once, here and everywhere; a signal's handler may call it."""
        ...


class Backups(Protocol):
    """Copies of checkpoints with a neighbour, for processes on different machines. Checkpoints go by the names of their folders."""

    def held(self) -> dict[str, list[str]]:
        """List the checkpoints of which a whole copy is kept here, by the number of the neighbour's stage."""
        ...

    def fetch(self, name: str, votes: Sequence[dict[str, Any]]) -> None:
        """Get this stage's part of a checkpoint back if it is missing here, and give neighbours theirs; all know who has it by the votes.

        Raise if no neighbour that should have a copy has one, or if it does not arrive.
        """
        ...

    def offer(self, name: str) -> None:
        """Begin to copy a checkpoint of this stage to its keeper, in spare bandwidth; a newer one takes its turn."""
        ...

    def copied(self, steps: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of some steps of which all copies that belong here have come, whole."""
        ...

    def uncopied(self) -> tuple[int, ...]:
        """Return the steps of which a copy that belongs here could not be written."""
        ...

    def confirm(self, step: int) -> None:
        """Take note that all have a checkpoint of this step, and delete older copies."""
        ...

    def copy_last(self, name: str) -> None:
        """Copy a checkpoint that all stages have, and return when all copies have come or cannot."""
        ...
