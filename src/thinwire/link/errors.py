"""What a link raises. All are `LinkError`, so a caller that only wants to know "the link is gone" catches one name."""

from __future__ import annotations


class LinkError(ConnectionError):
    """The link has failed for good; the message says why and what to try."""


class ProtocolError(LinkError):
    """A frame differs from the contract."""

    def __init__(self, field: str, value: object, limit: object, note: str = "") -> None:
        super().__init__(f"frame refused: {field} is {value}, expected {limit}" + (f" ({note})" if note else ""))
        self.field = field
        self.value = value
        self.limit = limit


class LinkClosed(LinkError):
    """One end has said goodbye and every frame sent before it was delivered."""


class EpochMoved(LinkError):
    """The peer runs a later epoch: abort the step and make a new link."""

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch
