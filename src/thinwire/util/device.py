"""The device a process computes on, and the memory it has used."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

PREFERRED = ("cuda", "xpu", "mps")
"""What `auto` takes, in this order; another device of torch is used when it is named."""


def choose_device(wanted: str, worker: int = 0) -> torch.device:
    """Return the device asked for and make it the current one; without a number, worker i of this machine takes card i mod count."""
    if wanted == "auto":
        wanted = next((kind for kind in PREFERRED if count_devices(kind)), "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"device {wanted!r} is not known to torch {torch.__version__}; available: {available()}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    count = count_devices(device.type)
    if count <= (device.index or 0):
        raise ValueError(f"device {wanted!r} is not available to torch {torch.__version__} here; available: {available()}")
    chosen = torch.device(device.type, worker % count if device.index is None else device.index)
    if count > 1:
        torch.get_device_module(device.type).set_device(chosen.index)
    return chosen


def count_devices(kind: str) -> int:
    """Return how many devices of a kind there are, 0 for one that torch has no part for."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    return module.device_count() if module.is_available() else 0


def available() -> str:
    """List the devices there are."""
    here = torch.accelerator.current_accelerator()
    kinds = dict.fromkeys((*PREFERRED, *([here.type] if here is not None else [])))
    return ", ".join([*(f"{kind}:{index}" for kind in kinds for index in range(count_devices(kind))), "cpu"])


def pins(device: torch.device) -> bool:
    """Tell whether a device copies to and from pinned host memory by itself."""
    return device.type not in ("cpu", "mps", "meta")


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, and wait for it; torch keeps the pinned memory for the next copy of its size."""
    if not pins(tensor.device):
        return tensor.cpu()
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    here.copy_(tensor, non_blocking=True)
    torch.accelerator.current_stream(tensor.device).synchronize()
    return here


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Let a tensor of the host be copied to a device, without waiting where that is possible."""
    return tensor.pin_memory().to(device, non_blocking=True) if pins(device) and tensor.device.type == "cpu" else tensor.to(device)


def has_fp64(device: torch.device) -> bool:
    """Tell whether a device computes in fp64."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed what it was told to: before that a clock tells nothing of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_rss_bytes() -> int | None:
    """Return the most memory this process has held, None where the system does not tell."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
