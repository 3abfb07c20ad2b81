"""What the person at this machine is told: a line on standard error, written at once, for other threads and processes write there too."""

from __future__ import annotations

import sys


def say_aloud(text: str) -> None:
    """Write a line; `print` would write its end by itself."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def note(text: str) -> None:
    """Tell what happened."""
    say_aloud(f"thinwire: note: {text}")


def warn(text: str) -> None:
    """Tell what went wrong while the run goes on."""
    say_aloud(f"thinwire: warning: {text}")
