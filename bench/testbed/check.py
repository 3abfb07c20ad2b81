"""Measure a path of the testbed against what was asked, with plain sockets: `python -m testbed check`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path as File
from typing import Any

from testbed.bed import Testbed
from testbed.path import Path

PEER = File(__file__).with_name("peer.py")
TCP_SHARE = 1448 / 1500  # payload of a full packet: 20 bytes IP, 20 TCP, 12 timestamps


def start_listener(bed: Testbed, host: int, towards: int, **options: Any) -> None:
    """Start the answering end in a host and wait until it listens."""
    command = [sys.executable, "-I", "-S", str(PEER), "listen", bed.address(host, towards), json.dumps(options)]
    process = bed.popen(host, command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "listening\n":
        raise ValueError("the listening end did not start; its message is above")


def ask(bed: Testbed, what: str, host: int = 0, peer: int = 1, **options: Any) -> Any:
    """Run one measurement from a host against its neighbour."""
    command = [sys.executable, "-I", "-S", str(PEER), what, bed.address(peer, towards=host), json.dumps(options)]
    return json.loads(bed.run(host, command, stdout=subprocess.PIPE, text=True, timeout=120).stdout)


def kernel(bed: Testbed, parameter: str) -> str:
    return bed.run(0, ["cat", f"/proc/sys/net/ipv4/{parameter}"], stdout=subprocess.PIPE, text=True).stdout.strip()


def measure_rates(bed: Testbed, do: str, seconds: float, congestion: str | None) -> tuple[dict[str, float], float]:
    """Return the rates and the share of a core that the forwarder took."""
    cpu, started = bed.counters(0)["cpu_seconds"], time.monotonic()
    warmup = 2.0 + 10 * bed.paths[0].rtt_ms / 1e3
    found = ask(bed, "rates", do=do, warmup=warmup, seconds=seconds, congestion=congestion)
    return found, (bed.counters(0)["cpu_seconds"] - cpu) / (time.monotonic() - started)


def check(path: Path, congestion: str | None, seconds: float) -> None:
    """Print asked against got."""
    back = path.back or path
    with Testbed([path]) as bed:
        start_listener(bed, 1, towards=0, congestion=congestion)
        print(f"congestion control in a host: {kernel(bed, 'tcp_available_congestion_control')}; ", end="")
        print(f"default {kernel(bed, 'tcp_congestion_control')}; measured {congestion or 'the default'}")
        print(f"{'':34}{'asked':>10}{'got':>10}   note")
        trips = ask(bed, "round_trips", count=max(10, min(100, int(3e3 / max(path.rtt_ms, 1)))))
        row("round trip, ms", path.rtt_ms, trips["median"], f"least {trips['least']:.2f}, most {trips['most']:.2f}")
        for do in ("take", "give", "both"):
            rates, cpu = measure_rates(bed, do, seconds, congestion)
            for direction, rate in rates.items():
                asked = (path if direction == "there" else back).rate_mbps * TCP_SHARE
                label = f"TCP {direction}{', both at once' if do == 'both' else ''}, Mbit/s"
                row(label, asked, rate, f"{100 * rate / asked:.1f} %; forwarder {100 * cpu:.0f} % of a core")
        # Half the rate at most: the queue must not add to the loss.
        lost = ask(bed, "datagram_loss", count=4000, per_second=min(2000.0, path.rate_mbps * 250))
        row("datagrams lost, %", 100 * path.loss, 100 * lost, "4000 of 200 bytes")
        counters = bed.counters(0)
    for direction, each in zip(("there", "back"), counters["directions"], strict=True):
        shares = f"lost {100 * each['lost'] / each['packets']:.3f} %, dropped by the queue {100 * each['dropped'] / each['packets']:.3f} %"
        print(f"forwarder {direction}: {each['packets']} packets, {shares}, latest wake-up {1e3 * each['latest']:.1f} ms")


def row(label: str, asked: float, got: float, note: str) -> None:
    print(f"{label:34}{asked:10.2f}{got:10.2f}   {note}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=80.0, help="Mbit/s of IP packets")
    parser.add_argument("--rate-back", type=float, help="Mbit/s towards host 0, if it differs")
    parser.add_argument("--delay", type=float, default=25.0, help="one-way, ms")
    parser.add_argument("--jitter", type=float, default=0.0, help="up to this many ms more")
    parser.add_argument("--loss", type=float, default=0.0, help="probability that a packet is lost: 0.005 is 0.5 %%")
    parser.add_argument("--queue", type=float, help="KB; unset: rate x round-trip time")
    parser.add_argument("--congestion", help="bbr, cubic, reno; unset: the kernel's default")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each transfer behind its start-up")


def run(arguments: argparse.Namespace) -> None:
    common = {"delay_ms": arguments.delay, "jitter_ms": arguments.jitter, "loss": arguments.loss, "queue_kb": arguments.queue}
    back = Path(rate_mbps=arguments.rate_back, **common) if arguments.rate_back else None
    check(Path(rate_mbps=arguments.rate, back=back, **common), arguments.congestion, arguments.seconds)
