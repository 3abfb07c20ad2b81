"""Which releases of torch were tried, and which engine runs the pipeline there; torch itself is not imported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

Engine = Literal["torch", "own"]
Release = tuple[int, int]
TRIED: dict[Release, Engine] = {(2, 12): "torch", (2, 13): "torch", (2, 14): "torch", (2, 15): "own"}
"""The releases of `pyproject.toml`, and who runs the pipeline there by itself.

* 2.13: the suite runs on it, with both engines.
* 2.12 and 2.14 have the private names that `pipeline/torch_engine.py` uses, and mean the same by them.
* 2.15: the stages no longer vote on their shapes by methods that can be replaced, but by an all-reduce, which needs a group of all stages.
* 2.9 and 2.10 send tensors for the vote before it can be replaced. Nothing else is known of what is older than 2.12.

On all that stands nowhere here our own engine runs too: it uses public names alone.
"""
INSTALL = "in the checkout: pip install -c constraints.txt -e . (README, section Install, for CPU, CUDA and Mac)"


def check_torch() -> str | None:
    """Raise ValueError unless torch is installed; return what to tell of a release that nobody has tried."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        if find_spec("torch") is None:
            raise ValueError(f"torch is not installed; {INSTALL}") from None
        return None  # built in a way that left no version: it will say its own
    found = release(installed)
    if found in TRIED:
        return None
    return (
        f"torch {installed} is installed, this release of thinwire was tried on {written(min(TRIED))} to {written(max(TRIED))}: it goes on "
        f"with its own pipeline engine; if something fails, install one of these, {INSTALL}"
    )


def choose_engine(wanted: Literal["auto", "torch", "own"], installed: str) -> Engine:
    """Return who runs the pipeline on an installed version of torch; refuse torch's engine where it is another than we know."""
    known = TRIED.get(release(installed), "own")
    if wanted == "torch" and known != "torch":
        able = [written(each) for each, engine in TRIED.items() if engine == "torch"]
        raise ValueError(
            f"pipeline.engine is torch, which works with torch {', '.join(able)}, and {installed} is installed; leave --pipeline.engine at "
            "auto, or install one of these"
        )
    return known if wanted == "auto" else wanted


def release(text: str) -> Release:
    """Return the release that a version belongs to; what is no version belongs to none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def written(release: Release) -> str:
    """Write a release."""
    return ".".join(map(str, release))
