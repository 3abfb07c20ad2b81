"""What a link adds to the bytes that a codec declares, item by item, as frames grow.

    sudo .venv/bin/python bench/bytes.py

Two stages on the testbed (80 Mbit/s, round trip 50 ms), real backend and links with mutual TLS, steps of 16 microbatches. Counted at the
socket of stage 0 after the link has opened; the handshake comes once per connection and is shown apart. TCP's own headers and packets
are the kernel's and not counted. Declared: the codec's payload and the ids that ride with it.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from engine_bench import CONTEXT, Order, run_config, run_sides, write_results
from testbed import obstacle
from thinwire.codecs.build import make_codec
from thinwire.link.frame import HEADER_BYTES
from thinwire.link.probe import RECORD_OVERHEAD
from thinwire.pipeline.backend import slots

SIZES = (4_000, 80_000, 500_000)
STEPS = 10
LIMIT = 0.03


def items(order: Order, found: dict[str, Any], way: str) -> dict[str, float]:
    """Split what crossed the socket in one direction (`sent` is forward for stage 0)."""
    config = run_config(order)
    codec = make_codec(config.codec, config.model)
    direction = "forward" if way == "sent" else "backward"
    parts = slots(codec, 1, CONTEXT)[direction]  # type: ignore[index]
    declared = sum(slot.spec.size(slot.direction) for slot in parts) * order.microbatches * (order.steps + 2)
    before, after = found["opened"][way], found["done"][way]
    grown = {key: after[key] - before[key] for key in after}
    assert grown["payload_boundary"] == declared, "the link carried other bytes than the codec declares"
    return {
        "payload": order.payload_bytes,
        "way": direction,
        "declared": declared,
        "socket": grown["socket"],
        "headers": grown["framed_boundary"] - declared,
        "control": grown["framed_control"] - grown["payload_control"],
        "tls": grown["socket"] - grown["framed"],
        "handshake": before["socket"],
        "over": grown["socket"] / declared - 1,
    }


def main() -> None:
    if reason := obstacle():
        sys.exit(reason)
    table = Table(
        title=f"Socket bytes over declared bytes, % of declared; header {HEADER_BYTES} B a part, TLS {RECORD_OVERHEAD} B a record"
    )
    names = {"headers": "headers", "control": "acknowledgements, pings", "tls": "TLS records"}
    for heading in (
        "payload",
        "direction",
        "declared MB",
        *names.values(),
        "all",
        f"within {100 * LIMIT:.0f} %",
        "handshake, HELLO: bytes once",
    ):
        table.add_column(heading, justify="right")
    rows = []
    for size in SIZES:
        order = Order(
            stages=2, microbatches=16, payload_bytes=size, rate_mbps=80, rtt_ms=50, steps=STEPS, forward_seconds=0.02, backward_seconds=0.04
        )
        found = run_sides(order)["thinwire"]
        for way in ("sent", "received"):
            row = items(order, found, way)
            rows.append(row)
            shares = [f"{100 * row[key] / row['declared']:.2f}" for key in names]
            held = "yes" if row["over"] <= LIMIT else "no"
            cells = (f"{size:,}", str(row["way"]), f"{row['declared'] / 1e6:.1f}", *shares, f"{100 * row['over']:.2f}", held)
            table.add_row(*cells, str(row["handshake"]))
    Console(width=140).print(table)
    write_results("bytes", rows)


if __name__ == "__main__":
    main()
