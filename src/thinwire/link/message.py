"""Messages in JSON that come from a peer: text that is safe to show, and forms that say what a message may be.

Whatever does not have its form is refused by name (`ProtocolError`), before anyone uses it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.link.errors import ProtocolError
from thinwire.util.shown import shown

DEEPEST = 16
"""Most levels of a message."""
LONGEST_TEXT = 4096
"""Most characters of a text in a message; what is longer is cut, and refused where it must be exact."""


def decode_message(data: bytes | bytearray | memoryview, what: str = "message") -> dict[str, Any]:
    """Read an object in JSON; all its texts can be shown as they are."""
    try:
        message = json.loads(bytes(data).decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(what, f"{type(error).__name__}: {error}", "JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError(what, type(message).__name__, "an object")
    return printable(message, what)


def _safe(text: str) -> str:
    """Return a text that can be shown; nearly all are so, and messages have many."""
    return text if len(text) <= LONGEST_TEXT and text.isprintable() else shown(text, LONGEST_TEXT)


def printable(value: Any, what: str = "message", depth: int = 0) -> Any:
    """Return a value of JSON with control characters and halves of characters written as escapes, not nested too deeply."""
    if isinstance(value, str):
        return _safe(value)
    if isinstance(value, (dict, list)) and depth >= DEEPEST:
        raise ProtocolError(what, "nested more deeply", f"at most {DEEPEST} levels")
    if isinstance(value, dict):
        return {_safe(name): printable(each, what, depth + 1) for name, each in value.items()}
    if isinstance(value, list):
        return [printable(each, what, depth + 1) for each in value]
    return value


@dataclass(frozen=True)
class Form:
    """What a value may be."""

    text: str
    """For people."""
    check: Callable[[Any, str], None]
    """Raise ProtocolError for a value that is not so; the text says where it stands."""


def rule(text: str, holds: Callable[[Any], bool]) -> Form:
    """Make a form from a test."""

    def check(value: Any, where: str) -> None:
        if not holds(value):
            raise ProtocolError(where, value if isinstance(value, (int, float)) else repr(value), text)

    return Form(text, check)


ANY = rule("anything", lambda value: True)
FLAG = rule("true or false", lambda value: type(value) is bool)
TEXT = rule("a text", lambda value: type(value) is str)


def whole(least: int, most: int) -> Form:
    """Describe a whole number."""
    return rule(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def number(least: float = -math.inf, most: float = math.inf) -> Form:
    """Describe a number that a float can hold; NaN only where there are no limits."""
    limited = f" from {least:g} to {most:g}" if math.isfinite(least) or math.isfinite(most) else ""

    def holds(value: Any) -> bool:
        if type(value) is int:
            return abs(value) < 2**63 and least <= value <= most
        return type(value) is float and (least <= value <= most or (math.isnan(value) and not limited))

    return rule(f"a number{limited}", holds)


def text_like(pattern: re.Pattern[str], text: str) -> Form:
    """Describe a text that matches a pattern."""
    return rule(text, lambda value: type(value) is str and pattern.fullmatch(value) is not None)


def optional(form: Form) -> Form:
    """Describe a value that may be null."""

    def check(value: Any, where: str) -> None:
        if value is not None:
            form.check(value, where)

    return Form(f"{form.text}, or null", check)


def list_of(form: Form, most: int) -> Form:
    """Describe a list."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) > most:
            raise ProtocolError(where, f"a list of {len(value)}" if isinstance(value, list) else repr(value), f"at most {most}")
        for number, each in enumerate(value):
            form.check(each, f"{where}[{number}]")

    return Form(f"a list of {form.text}", check)


def pair(first: Form, second: Form = ANY) -> Form:
    """Describe a list of two."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) != 2:
            raise ProtocolError(where, repr(value), f"{first.text} and {second.text}")
        first.check(value[0], f"{where}[0]")
        second.check(value[1], f"{where}[1]")

    return Form(f"{first.text} and {second.text}", check)


def table_of(form: Form, most: int) -> Form:
    """Describe an object with any names."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict) or len(value) > most:
            raise ProtocolError(where, f"{len(value)} names" if isinstance(value, dict) else repr(value), f"an object of at most {most}")
        for name, each in value.items():
            form.check(each, f"{where}.{shown(name, 40)}")

    return Form(f"an object of {form.text}", check)


def fields(forms: Mapping[str, Form], *, others: bool = False) -> Form:
    """Describe an object with these fields; it may have `others`."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict) or not (forms.keys() <= value.keys() if others else forms.keys() == value.keys()):
            found = sorted(value) if isinstance(value, dict) else repr(value)
            raise ProtocolError(where, found, f"an object with {', '.join(forms)}")
        for name, form in forms.items():
            form.check(value[name], f"{where}.{name}")

    return Form(f"an object with {', '.join(forms)}", check)
