"""A connection to a peer before the two have agreed to use it: our HELLO out, theirs in, and nothing else.

What is already in use goes on meanwhile: whoever comes may be a second process with other settings, or a copy of the machine, and is judged
before anything is given up for it. Knows no link; `reception.py` judges.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from thinwire.link.connection import Connection
from thinwire.link.contract import Contract
from thinwire.link.errors import ProtocolError
from thinwire.link.frame import Frame, Header, Kind, Parser, encode


class Greeting:
    """The beginning of one connection."""

    def __init__(self, connection: Connection, contract: Contract, deadline: float) -> None:
        self.connection, self.deadline = connection, deadline
        self.said = False
        """Whether our HELLO has gone out."""
        self._contract = contract
        self.check: Callable[[Header], None] = self._check
        """What may come; another rule holds once the connection is in use."""
        self.parser = Parser(lambda header: self.check(header))

    def _check(self, header: Header) -> None:
        if header.kind not in (Kind.HELLO, Kind.ABORT):
            raise ProtocolError("kind", header.kind.name, "HELLO first")
        self._contract.check_unsequenced(header)

    def say(self, hello: Frame, now: float) -> None:
        """Send our HELLO; what has been received must not grow behind its back from here on."""
        data = encode(hello)
        self.connection.meter.sent.framed[hello.header.channel] += len(data)
        self.connection.write([data], now)
        self.connection.flush(now)
        self.said = True

    def refuse(self, abort: Frame, now: float) -> None:
        """Tell the peer why this connection is not used, if it still hears it."""
        with suppress(OSError):
            self.connection.write([encode(abort)], now)
            self.connection.flush(now)
            self.connection.end_output()
