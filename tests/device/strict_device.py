"""The device `strict` as torch knows it: loaded by torch itself through its entry point, in every process that finds this package.

`strict_build.py` makes the package: this file, the library beside it and the entry point.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

PACKAGE = str(Path("src", "thinwire"))
COPYING = (str(Path("util", "device.py")), str(Path("bits", "raw.py")))
"""Files whose functions copy for others: the line that calls them is meant."""
watchers: list[Counter[tuple[str, str]]] = []


def register() -> None:
    """Make `torch.device("strict")` usable in this process."""
    torch.ops.load_library(str(Path(__file__).with_name("libstrict_device.so")))
    torch.utils.rename_privateuse1_backend("strict")
    torch._register_device_module("strict", device_module())
    library = torch.library.Library("strict", "IMPL")
    library.impl("synchronised", note, "CompositeExplicitAutograd")
    watchers_of_library.append(library)


watchers_of_library: list[torch.library.Library] = []


def device_module() -> ModuleType:
    """Return what is `torch.strict`: what torch and users ask of any device."""
    module = ModuleType("strict")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    # The engine saves and restores it; nothing is drawn on the device.
    module.get_rng_state = lambda device=None: torch.zeros(1, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_bf16_supported = lambda: True
    return module


def note(what: str) -> None:
    """Count that the host has waited for the device, by the innermost line of thinwire that is under way."""
    if watchers:
        reason = what if threading.current_thread() is threading.main_thread() else f"{what}, in {threading.current_thread().name}"
        for watcher in watchers:
            watcher[place(), reason] += 1


def place() -> str:
    frame = sys._getframe()
    while frame is not None:
        if PACKAGE in frame.f_code.co_filename and not frame.f_code.co_filename.endswith(COPYING):
            return f"{frame.f_code.co_filename.partition(PACKAGE)[2][1:]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside of thinwire"


@contextmanager
def watched() -> Iterator[Counter[tuple[str, str]]]:
    """Count what makes the host wait, as {(file:line function, what): times}."""
    watcher: Counter[tuple[str, str]] = Counter()
    watchers.append(watcher)
    try:
        yield watcher
    finally:
        watchers.remove(watcher)
