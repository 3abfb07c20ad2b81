"""The group of a run that has one process: it agrees with itself."""

from __future__ import annotations

from typing import Any, NoReturn

from thinwire.link.message import ANY, Form
from thinwire.pipeline.outcome import Outcome
from thinwire.pipeline.protocols import Abandoned
from thinwire.replicas.graph import make_graph
from thinwire.replicas.peers import Peers


class GroupAlone:
    """Agree on what the one process says."""

    number, replica = 0, 0

    def __init__(self) -> None:
        self.peers = Peers(0, make_graph("complete", 1), {})

    def settle(self, own: Outcome, *, meeting: bool = True, alike: bool = False) -> Outcome:
        return own if meeting else own.alone()

    def announce(self, facts: dict[str, Any] | None, form: Form = ANY) -> dict[str, Any]:
        assert facts is not None, "only a first stage makes the facts"
        return facts

    def gather(self, own: Any, form: Form = ANY) -> list[Any]:
        return [own]

    def abandon(self) -> NoReturn:
        """Give up the step under way: the signal has interrupted the very thread that computes."""
        raise Abandoned
