"""Sizes as people write them: 2GB, 500MB, 1.5GiB."""

from __future__ import annotations

import math
import re

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def read_size(text: str, setting: str = "memory.budget") -> int:
    """Return the bytes that a text says; `setting` is its name in errors."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Z]*)\s*", text, re.ASCII | re.IGNORECASE)
    unit = match[2].upper() if match else ""
    unit += "B" if unit and not unit.endswith("B") else ""  # 2G is 2GB
    if not match or unit not in UNITS:
        raise ValueError(
            f"{setting} is {text!r}; give a number and a unit, such as 2GB, 500MB or 1.5GiB (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)"
        )
    size = int(float(match[1]) * UNITS[unit])
    if size < 1:
        raise ValueError(f"{setting} is {text!r}, which is less than a byte; give a larger size, such as 500MB")
    return size


def write_size(size: float, up: bool = False) -> str:
    """Write bytes with three digits and the fitting unit; `up` rounds up, so that the text read again is never less."""
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if abs(size) >= UNITS[unit]), "B")
    value = size / UNITS[unit]
    digits = 0 if unit == "B" or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    if up:
        value = math.ceil(value * 10**digits) / 10**digits
    return f"{value:.{digits}f} {unit}"


def near_divisors(number: int, wanted: int) -> str:
    """Name the divisors of a number just below and above the wanted one."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = [divisor for divisor in divisors if divisor < wanted]
    above = [divisor for divisor in divisors if divisor > wanted]
    return " or ".join(str(divisor) for divisor in below[-1:] + above[:1])
