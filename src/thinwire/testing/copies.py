"""How long copies between host and device take, in both directions."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

SIZES = (80_000, 2**20, 2**25)
"""A payload that was compressed well, one that was not, and a large one."""
ROUNDS = 20


@dataclass(frozen=True)
class Copy:
    """The middle time of one kind of copy."""

    size: int
    way: str
    pinned: bool
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.size / self.seconds


def time_copies(device: torch.device) -> list[Copy]:
    """Time copies of a few sizes; from pinned memory too where the device has such a thing."""
    wait = torch.get_device_module(device).synchronize
    found = []
    for size in SIZES:
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        for pinned in (False, True) if device.type == "cuda" else (False,):
            here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            for way, source, target in (("to the device", here, there), ("to the host", there, here)):
                times = []
                for _ in range(ROUNDS):
                    wait()
                    started = time.perf_counter()
                    target.copy_(source, non_blocking=pinned)
                    wait()
                    times.append(time.perf_counter() - started)
                found.append(Copy(size, way, pinned, statistics.median(times)))
    return found
