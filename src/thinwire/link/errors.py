"""What a link raises, and the codes by which the two ends tell each other why.

All are `LinkError`, so a caller that only wants to know "the link is gone" catches one name. Who is told acts on the code; the text is for
people.
"""

from __future__ import annotations

from enum import IntEnum

from thinwire.link.options import MAX_REASON_LETTERS
from thinwire.util.shown import shown


class Abort(IntEnum):
    """Why a link is given up: the first byte of an ABORT. Numbers are never used again for something else."""

    LOST = 0
    """The link, or something that the run cannot do without, has failed for good. A code that is not known here means this too."""
    RECOVERING = 1
    """A worker was lost or replaced: abandon the step, and make new links in a later epoch."""
    REPLACED = 2
    """The process that is told is no longer the worker that it was: a newer one has its worker id."""
    STOPPING = 3
    """Someone has asked the run to end at once."""
    REFUSED = 4
    """As RECOVERING: a worker has refused to start, and somebody must start it again."""
    STUCK = 5
    """As RECOVERING: a worker did not get on, and has ended itself."""
    ENDED = 6
    """As RECOVERING: a worker's process has ended."""
    PROTOCOL = 7
    """What was sent is not what the two ends agreed on."""


class LinkError(ConnectionError):
    """The link has failed for good; the message says why and what to try."""

    code = Abort.LOST
    """What the other links are told."""

    def __init__(self, message: str, *, code: Abort | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.code = self.code if code is None else code
        self.reason = message if reason is None else reason
        """What began it, without the way on which it was heard of."""

    @property
    def passed_on(self) -> Abort:
        """Return the code for other peers: that this process was replaced concerns none of them, they have a newer one to meet."""
        return Abort.RECOVERING if self.code is Abort.REPLACED else self.code


class Alert(ConnectionError):
    """The peer does not want this end, and says so below the link: the message is its reason."""


class ProtocolError(LinkError):
    """A frame differs from the contract."""

    code = Abort.PROTOCOL

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

    code = Abort.RECOVERING

    def __init__(self, message: str, epoch: int = 0, *, code: Abort | None = None, reason: str | None = None) -> None:
        super().__init__(message, code=code, reason=reason)
        self.epoch = epoch
        """The epoch that a peer is known to be in; 0: unknown."""


class Replaced(LinkError):
    """This process is no longer the worker of its stage: a newer one has taken its place."""

    code = Abort.REPLACED


class Stopping(LinkError):
    """Someone has asked the run to end at once: abandon the step, write what was committed."""

    code = Abort.STOPPING


KINDS: dict[Abort, type[LinkError]] = {
    Abort.RECOVERING: Interrupted,
    Abort.REFUSED: Interrupted,
    Abort.STUCK: Interrupted,
    Abort.ENDED: Interrupted,
    Abort.REPLACED: Replaced,
    Abort.STOPPING: Stopping,
}
"""What a code means to whoever is told it; the others are failures for good."""


def aborted(how: str, code: Abort, reason: str) -> LinkError:
    """Return the error that an ABORT means; `how` says at which end it was."""
    return KINDS.get(code, LinkError)(f"{how}: {reason}", code=code, reason=reason)


def encode_abort(code: Abort, reason: str) -> bytes:
    """Return the payload of an ABORT."""
    return bytes([code]) + shown(reason, MAX_REASON_LETTERS).encode()


def decode_abort(payload: bytes | bytearray | memoryview) -> tuple[Abort, str]:
    """Read the payload of an ABORT: any bytes are one."""
    data = bytes(payload)
    code = Abort(data[0]) if data and data[0] in set(Abort) else Abort.LOST
    return code, shown(data[1:].decode(errors="replace"), MAX_REASON_LETTERS)


def refused(peer: object, reason: object, fingerprint: str = "") -> LinkError:
    """Return the error that a peer's alert means; `fingerprint` is of this worker's certificate."""
    mine = f" ({fingerprint})" if fingerprint else ""
    remedy = f"its roster must hold this worker's valid certificate{mine}, and no standby may have taken this worker's place"
    return LinkError(f"{peer} refused this worker: {reason}; {remedy}")
