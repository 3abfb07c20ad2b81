"""Which releases of torch are known, and which engine runs the pipeline there; torch itself is not imported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

EngineName = Literal["torch", "own"]
Release = tuple[int, int]
KNOWN: dict[Release, EngineName] = {(2, 12): "own", (2, 13): "torch", (2, 14): "torch", (2, 15): "own"}
"""The releases of `pyproject.toml`, and who runs the pipeline there by itself.

* 2.13: the suite runs on it, with both engines.
* 2.14: its pipeline engine (2.14.1), put into 2.13, passes the tests of the engines. The rest of it was not run.
* 2.12: its engine (2.12.1), put into 2.13, wants a gradient for all that a stage receives, ids too, and fails. The rest of it was not run.
* 2.15: its stages agree on shapes by an all-reduce over all of them, which our group has not. Our own engine was run on it.
* 2.9 and 2.10 send tensors for such a vote. Nothing else is known of what is older than 2.12.

Our own engine runs on all that stands nowhere here too: it uses public names alone.
"""
INSTALL = "in the checkout: pip install -c constraints.txt -e . (README, section Install, for CPU, CUDA and Mac)"


def check_torch() -> str | None:
    """Raise ValueError unless torch is installed; return what to tell of a release that is not known."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        if find_spec("torch") is None:
            raise ValueError(f"torch is not installed; {INSTALL}") from None
        return None  # built in a way that left no version: it will say its own
    found = release(installed)
    if found in KNOWN:
        return None
    return (
        f"torch {installed} is installed, this release of thinwire knows {written(min(KNOWN))} to {written(max(KNOWN))}: it goes on "
        f"with its own pipeline engine; if something fails, install one of these, {INSTALL}"
    )


def choose_engine(wanted: Literal["auto", "torch", "own"], installed: str) -> EngineName:
    """Return who runs the pipeline on an installed version of torch; refuse torch's engine where it is another than we know."""
    known = KNOWN.get(release(installed), "own")
    if wanted == "torch" and known != "torch":
        able = [written(each) for each, engine in KNOWN.items() if engine == "torch"]
        raise ValueError(
            f"pipeline.engine is torch, which works with torch {', '.join(able)}, and {installed} is installed; set pipeline.engine to "
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
