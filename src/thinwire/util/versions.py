"""Whether the installed torch is one that this release runs on; torch itself is not imported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

OLDEST, TOO_NEW = (2, 12), (2, 15)
"""The range of `pyproject.toml`: from the first, below the second."""
INSTALL = "in the checkout: pip install -c constraints.txt -e . (README, section Install, for CPU, CUDA and Mac)"


def refuse_other_torch() -> None:
    """Raise ValueError unless torch is installed, in a version whose pipeline engine has what our stages use."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        if find_spec("torch") is None:
            raise ValueError(f"torch is not installed; {INSTALL}") from None
        return  # built in a way that left no version: to try it says more than to refuse it
    match = re.match(r"(\d+)\.(\d+)", installed)
    if match and not OLDEST <= (int(match[1]), int(match[2])) < TOO_NEW:
        raise ValueError(
            f"torch {installed} is installed, this release runs on {written(OLDEST)} and newer, below {written(TOO_NEW)}: it uses parts of "
            f"torch's pipeline engine that other versions do not have; install one of these, {INSTALL}"
        )


def written(release: tuple[int, int]) -> str:
    """Write a version."""
    return ".".join(map(str, release))
