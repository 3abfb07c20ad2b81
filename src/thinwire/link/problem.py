"""Why there is no connection to a peer, each cause with what helps. Words only, no I/O; those of TCP are in `tcp/words.py`."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.link.errors import LinkError


@dataclass(frozen=True)
class Problem:
    """What happened, what to do about it, and whether the peer may come if only it gets more time."""

    text: str
    remedy: str = "check that it runs, its address in the roster, and firewalls"
    patience: bool = True
    refusal: bool = False
    """Whether the peer itself, known by its certificate, does not want this worker."""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


NO_ATTEMPT = Problem("no attempt yet")
NOT_CONNECTED = Problem(
    "the peer has not connected yet",
    "check that it runs, that its roster has the address at which this machine is reached, and that firewall and router let the port in",
)


def given_up(peer: object, seconds: float, problem: Problem) -> LinkError:
    """Return the error of a link that was without a connection for too long."""
    longer = f"; if it only needs longer, choose a larger --link.reconnect_seconds, now {seconds:g}" if problem.patience else ""
    return LinkError(f"no connection to {peer} for {seconds} s (last problem: {problem.text}); {problem.remedy}{longer}")


class Unreached(Exception):
    """There is no stream to a peer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem
