"""Measure the work of a link's queues and parser on an 80 KB frame, in one thread, without sockets and TLS: others disturb it little.

python bench/link_work.py
"""

from __future__ import annotations

import statistics
import time

from speed_link import CONTRACT, FLOW, FRAME, data_frame
from thinwire.link.contract import Cursor
from thinwire.link.frame import Channel, Parser
from thinwire.link.inbox import Inbox, decode_ack
from thinwire.link.meter import LinkMeter
from thinwire.link.options import LinkOptions
from thinwire.link.outbox import Outbox
from thinwire.link.session import LARGE_BATCH

ROUNDS, RECORD = 3000, 2**14


def main() -> None:
    outbox = Outbox(Cursor(FLOW, CONTRACT), LinkOptions(), LinkMeter())
    inbox = Inbox(Cursor(FLOW, CONTRACT), LinkOptions(), LinkMeter())
    parser, payload = Parser(inbox.check), bytes(FRAME)
    sending, receiving = [], []
    for step in range(ROUNDS):
        started = time.perf_counter()
        outbox.put(data_frame(step, payload), None)
        batches = []
        while (batch := outbox.take(LARGE_BATCH)) is not None:
            batches.append(b"".join(batch.pieces))
        sending.append(time.perf_counter() - started)
        records = [data[start : start + RECORD] for data in batches for start in range(0, len(data), RECORD)]
        started = time.perf_counter()
        for record in records:
            for part in parser.feed(record):
                inbox.accept(part, 0.0)
        inbox.take(Channel.BOUNDARY, 0)
        receiving.append(time.perf_counter() - started)
        outbox.acknowledge(*decode_ack(inbox.acknowledgement()))
    for name, times in (("sender", sending), ("receiver", receiving)):
        print(f"{name:10s} {statistics.quantiles(times, n=20)[0] * 1e6:6.1f} us per 80 KB frame (5 % quantile)")


if __name__ == "__main__":
    main()
