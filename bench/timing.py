"""Shared by the timing benches: alternate the sides inside one run and compare medians, because absolute times are not stable."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def alternate(sides: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Time each side in turn, `repeats` times; return the seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warmup + repeats):
        for name, work in sides.items():
            started = time.perf_counter()
            work()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def median_ratio(seconds: Mapping[str, list[float]], side: str, reference: str) -> float:
    """Return the median of side / reference over the turns."""
    return statistics.median(a / b for a, b in zip(seconds[side], seconds[reference], strict=True))
