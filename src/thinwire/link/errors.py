"""What a link raises. All are `LinkError`, so a caller that only wants to know "the link is gone" catches one name."""

from __future__ import annotations

import ssl

from thinwire.util.shown import shown


class LinkError(ConnectionError):
    """The link has failed for good; the message says why and what to try."""


class ProtocolError(LinkError):
    """A frame differs from the contract."""

    def __init__(self, field: str, value: object, limit: object, note: str = "") -> None:
        self.field, self.value, self.limit, self.note = field, value, limit, note
        text = f"frame refused: {shown(field)} is {shown(value)}, expected {shown(limit, 400)}"
        super().__init__(text + (f" ({shown(note)})" if note else ""))

    def sent_by(self, peer: object) -> ProtocolError:
        """Return the same, with who sent it."""
        return ProtocolError(self.field, self.value, self.limit, f"{self.note}; from {peer}" if self.note else f"from {peer}")


class LinkClosed(LinkError):
    """One end has said goodbye and every frame sent before it was delivered."""


class Interrupted(LinkError):
    """A worker was replaced, or another one found that out: abandon the step, and make new links in a later epoch."""

    def __init__(self, message: str, epoch: int = 0) -> None:
        super().__init__(message)
        self.epoch = epoch
        """The epoch that a peer is known to be in; 0: unknown."""


class Replaced(LinkError):
    """This process is no longer the worker of its stage: a newer one has taken its place."""


class Stopping(LinkError):
    """Someone has asked the run to end at once: abandon the step, write what was committed."""


RECOVERING, REPLACED, STOPPING = "recovering: ", "replaced: ", "stopping: "
"""How the reason of an ABORT begins that means one of the above."""
KINDS: dict[str, type[LinkError]] = {RECOVERING: Interrupted, REPLACED: Replaced, STOPPING: Stopping}


def aborted(message: str, reason: str) -> LinkError:
    """Return the error that an ABORT with this reason means."""
    kind = next((kind for word, kind in KINDS.items() if reason.startswith(word)), LinkError)
    return kind(f"{message}: {reason}")


def refused(peer: object, error: ssl.SSLError, fingerprint: str = "") -> LinkError:
    """Return the error that a peer's alert in the handshake means; `fingerprint` is of this worker's certificate."""
    reason = str(error.reason).lower().replace("_", " ")
    mine = f" ({fingerprint})" if fingerprint else ""
    remedy = f"its roster must hold this worker's valid certificate{mine}, and no standby may have taken this worker's place"
    return LinkError(f"{peer} refused this worker: {reason}; {remedy}")


def reason_of(error: LinkError) -> str:
    """Return the reason with which another link is aborted because of an error."""
    word = next((word for word, kind in KINDS.items() if isinstance(error, kind)), "")
    return f"{word}{error}"
