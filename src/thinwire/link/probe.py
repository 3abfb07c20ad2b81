"""Measure the round trip and the rate of an open link, without the help of the peer's program."""

from __future__ import annotations

from thinwire.link.frame import HEADER_BYTES, PART_BYTES
from thinwire.link.link import Link

RECORD_OVERHEAD = 22
"""Bytes TLS 1.3 adds to a record: 5 header, 1 content type, 16 tag."""


def probe(link: Link, *, burst_bytes: int = 2**20, timeout: float = 30.0) -> tuple[float, float]:
    """Return (round trip in seconds, socket bytes per second towards the peer).

    The rate is that of a burst of full parts, from the first to the last answer; on a fast link take a larger burst.
    """
    rtt = min(answered - asked for asked, answered in (link.echo(8, 1, timeout) for _ in range(3)))
    count = max(4, burst_bytes // PART_BYTES)
    _, *times = link.echo(PART_BYTES, count, timeout)
    elapsed = max(times[-1] - times[0], 1e-9)
    return rtt, (count - 1) * (PART_BYTES + HEADER_BYTES + RECORD_OVERHEAD) / elapsed
