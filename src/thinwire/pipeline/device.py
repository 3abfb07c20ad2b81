"""The device a process computes on, and the memory it has used."""

from __future__ import annotations

import sys

import torch

from thinwire.config.sections import Device


def choose_device(wanted: Device) -> torch.device:
    """Return the device asked for; `auto` takes cuda, then mps, then the CPU."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(name for name, here in available.items() if here))
    if not available[wanted]:
        here = ", ".join(name for name, there in available.items() if there)
        raise ValueError(f"device {wanted!r} is not available to torch {torch.__version__} here; available: {here}")
    return torch.device(wanted)


def peak_rss_bytes() -> int | None:
    """Return the most memory this process has held, None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed what it was told to: before that a clock tells nothing of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
