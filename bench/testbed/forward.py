"""The forwarder of one path: two TUN devices, one in each host's namespace, and between them a link of given rate, delay, jitter and loss.

Started by `bed.py` as a process of its own; not a command for people. One JSON argument; "ready" on stdout; then a line on stdin asks for
the counters (one JSON line), and the end of stdin ends the process, and the devices with it.

A packet is read at once, as by a network card, and waits in a virtual drop-tail queue: it leaves at max(now, end of the packet before) +
size / rate and arrives a delay later. A late wake-up therefore adds delay but takes no rate away. Sizes are IP packets without framing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from typing import Any

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
LARGEST_PACKET = 2048  # above the MTU of 1500
BATCH = 64  # packets read from one side before the other gets its turn
GRAIN_SECONDS = (
    0.0005  # between two deliveries in a direction: three full packets at 80 Mbit/s share a wake-up, which halves the processor time
)
JITTER_HOLD_SECONDS = 0.01  # a level of jitter lasts this long: independent draws per packet, kept in order, would all be near the maximum
IDLE_SECONDS = 1.0  # longest sleep, to notice that the parent died


class Direction:
    """Carry packets from one device to the other."""

    def __init__(self, source: int, target: int, shape: dict[str, float], seed: str) -> None:
        self.source, self.target = source, target
        self.rate = shape["rate_mbps"] * 1e6 / 8
        self.delay, self.jitter, self.loss = shape["delay_ms"] / 1e3, shape["jitter_ms"] / 1e3, shape["loss"]
        self.queue_seconds = shape["queue_kb"] * 1e3 / self.rate
        self.random = random.Random(seed)
        self.link_free = self.last_due = self.level_until = self.level = self.given = 0.0
        self.flying: deque[tuple[float, bytes]] = deque()
        self.packets = self.bytes = self.lost = self.dropped = 0
        self.latest = 0.0

    def take(self) -> None:
        """Read what the host has sent and decide when each packet arrives, if it does."""
        for _ in range(BATCH):
            try:
                packet = os.read(self.source, LARGEST_PACKET)
            except BlockingIOError:
                return
            now = time.monotonic()
            self.packets += 1
            if self.link_free - now > self.queue_seconds:
                self.dropped += 1
                continue
            self.bytes += len(packet)
            self.link_free = max(now, self.link_free) + len(packet) / self.rate
            if self.loss and self.random.random() < self.loss:
                self.lost += 1  # after it has taken its time on the link
                continue
            due = self.link_free + self.delay
            if self.jitter:
                due = max(self.last_due, due + self.jitter_level(now))
                self.last_due = due
            self.flying.append((due, packet))

    def jitter_level(self, now: float) -> float:
        if now >= self.level_until:
            self.level, self.level_until = self.random.uniform(0.0, self.jitter), now + JITTER_HOLD_SECONDS
        return self.level

    def wake(self) -> float:
        """Return when to deliver next."""
        return max(self.flying[0][0], self.given + GRAIN_SECONDS)

    def give(self) -> None:
        """Hand over what has arrived."""
        flying, now = self.flying, time.monotonic()
        if not flying or now < self.wake():
            return
        self.latest, self.given = max(self.latest, now - flying[0][0]), now
        while flying and flying[0][0] <= now:
            os.write(self.target, flying.popleft()[1])

    def counters(self) -> dict[str, float]:
        names = ("packets", "bytes", "lost", "dropped", "latest")
        return {name: getattr(self, name) for name in names}


def open_device(namespace: str, name: str) -> int:
    """Create a TUN device in a namespace; it lives as long as the descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def carry(directions: list[Direction]) -> None:
    """Forward until stdin ends or the parent is gone."""
    devices = [direction.source for direction in directions]
    control, parent = sys.stdin.fileno(), os.getppid()
    timeout = IDLE_SECONDS
    while os.getppid() == parent:
        readable = select.select([*devices, control], [], [], timeout)[0]
        for direction in directions:
            if direction.source in readable:
                direction.take()
            direction.give()
        if control in readable:
            if not os.read(control, 1024):
                return
            print(json.dumps({"directions": [each.counters() for each in directions], "cpu_seconds": time.process_time()}), flush=True)
        now = time.monotonic()
        wait = min((each.wake() - now for each in directions if each.flying), default=IDLE_SECONDS)
        timeout = min(max(wait, 0.0), IDLE_SECONDS)


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    left, right = (open_device(namespace, order["device"]) for namespace in order["namespaces"])
    pairs = ((left, right), (right, left))
    directions = [
        Direction(*pair, shape, f"{order['seed']} {index}") for index, (pair, shape) in enumerate(zip(pairs, order["shapes"], strict=True))
    ]
    with contextlib.suppress(PermissionError):  # real-time priority: a busy machine is no part of the link
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    carry(directions)


if __name__ == "__main__":
    main()
