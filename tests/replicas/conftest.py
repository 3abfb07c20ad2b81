"""Replicas as threads of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def brisk() -> Iterator[None]:
    """Let threads take turns often: a replica that waits for the others' messages would wait for their turns too."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    yield
    sys.setswitchinterval(before)
