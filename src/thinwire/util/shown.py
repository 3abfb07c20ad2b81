"""Show people what somebody else wrote, a peer or a file: it cannot move the cursor, begin a line of its own or fill a page."""

from __future__ import annotations

LONGEST = 200
"""Most characters of one value in a message."""
CUT = "..."


def shown(value: object, most: int = LONGEST) -> str:
    """Return a text for people: printable characters as they are, all others as escapes, and no more than `most` of them."""
    if isinstance(value, str) and len(value) <= most and value.isprintable():
        return value
    # What can be cut unseen is cut first: a value may be a megabyte.
    text = value[: most + 1] if isinstance(value, str) else _cut(value, most)
    plain = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text)
    return plain if len(plain) <= most else plain[: max(0, most - len(CUT))] + CUT


def _cut(value: object, most: int) -> str:
    """Write a value that is no text."""
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write the longest ones
    try:
        return str(value)[: most + 1]
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    except ValueError:
        return f"a {type(value).__name__} with a number of thousands of digits"
