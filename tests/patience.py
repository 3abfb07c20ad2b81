"""How long tests wait for what must happen: a guard against hanging, and no measurement.

A test says in which order things happen and why, never how soon: the busiest machine must pass it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 300.0
"""Seconds after which one wait is given up; pytest gives up a whole test after 600 (pyproject.toml)."""
POLL_SECONDS = 0.01


def wait_until(holds: Callable[[], object], *, alive: Callable[[], object] = lambda: True) -> None:
    """Return when something holds; fail when whoever should bring it about is gone, or when it never happens."""
    deadline = time.monotonic() + HANG
    while not holds():
        assert alive() or holds(), "whoever should bring it about has ended"
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(POLL_SECONDS)
