"""What went wrong, from an exception that nobody expected: where, why, and a traceback that ends with the cause."""

from __future__ import annotations

import traceback
from pathlib import Path


def causes(error: BaseException) -> list[BaseException]:
    """List an exception, what it was raised from, and so on to the first cause."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def raised_at(error: BaseException) -> str:
    """Say where an exception was raised."""
    calls = traceback.extract_tb(error.__traceback__)
    return f"{Path(calls[-1].filename).name}:{calls[-1].lineno}" if calls else "an unknown place"


def in_a_line(error: BaseException) -> str:
    """Say the first cause and where it was."""
    first = causes(error)[-1]
    text = next(iter(str(first).splitlines()), "")
    return f"{type(first).__name__}{f': {text}' if text else ''}, at {raised_at(first)}"


def trace_of(error: BaseException) -> str:
    """Write one traceback down to the first cause, and that last.

    torch's engine wraps what a stage raises into an error that lists all its inputs; the calls are of use, the list is not.
    """
    chain = causes(error)
    calls = [line for each in chain for line in traceback.format_tb(each.__traceback__)]
    return "".join(["Traceback (most recent call last):\n", *calls, *traceback.format_exception_only(chain[-1])]).rstrip()
