"""Make bad inputs from good ones, for `fuzz.py`: other values where JSON or TOML has one, lines that move, bytes that change."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

NUMBERS = (0, 1, -1, 2**16, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e308, math.inf, -math.inf, math.nan)
TEXTS = ("", "x", "x" * 5000, "\x1b[2J\n\r\x00", "\u202e", "\ud800", "../../x", "step-000004", "step-000009-1-0123abcd", "\u0660" * 6)
PLAIN = (True, False, None, [], {}, [[]], {"": 0}, [0] * 1000)
DEEP = "deep inside"
"""Stands for brackets in brackets."""
TOKENS: tuple[str, ...] = (
    *"[]{}\"',:=#.-+\\\n\t 0123456789eE",
    "true",
    "false",
    "null",
    "nan",
    "inf",
    "NaN",
    "Infinity",
    '"""',
    "'''",
    "[[",
    "]]",
)
TOKENS += (
    "\\u002d",
    "\\ud800",
    "\\U00110000",
    "1e999",
    "9" * 5000,
    "[" * 3000,
    "{" * 3000,
    "1979-05-27T07:32:00Z",
    "0x7f",
    "\x7f",
    "\ufeff",
)
VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|-?\d[\d.e+-]*|true|false|null")


def changed(generator: random.Random, data: bytes, other: bytes, text: bool) -> bytes:
    """Change an input in one to four ways; `other` is one to take parts from."""
    for _ in range(generator.choice((1, 1, 1, 2, 3, 4))):
        way = generator.random()
        if text and way < 0.45:
            data = another_value(generator, data)
        elif text and way < 0.75:
            data = another_token(generator, data)
        elif text and way < 0.85:
            data = other_lines(generator, data, other)
        else:
            data = other_bytes(generator, data, other)
    return data[: 2**20]


def another_value(generator: random.Random, data: bytes) -> bytes:
    """Change one value of an object in JSON; anything else gets another token."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return another_token(generator, data)
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [content]
    while waiting and len(places) < 10_000:
        each = waiting.pop()
        names = each if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        places += [(each, name) for name in names]
        waiting += [each[name] for name in names]
    if not places:
        return json.dumps(strange(generator)).encode()
    holder, name = generator.choice(places)
    way = generator.random()
    if way < 0.7:
        holder[name] = strange(generator) if way < 0.55 else near(generator, holder[name])
    elif way < 0.8:
        del holder[name]
    elif isinstance(holder, dict):
        holder[generator.choice((name, *TEXTS))] = strange(generator)
    else:
        holder.insert(name, strange(generator))
    try:
        written = json.dumps(content)
    except (ValueError, RecursionError):
        return data
    depth = generator.choice((5, 15, 17, 500, 2000))
    return written.replace(json.dumps(DEEP), generator.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))).encode()


def strange(generator: random.Random) -> Any:
    """Return a value that nobody expects."""
    return generator.choice((generator.choice(NUMBERS), generator.choice(TEXTS), generator.choice(PLAIN), DEEP))


def near(generator: random.Random, value: Any) -> Any:
    """Return a value like another one."""
    if isinstance(value, bool) or value is None:
        return generator.choice((0, 1, "", not value))
    if isinstance(value, (int, float)):
        return generator.choice((value + 1, -value, value * 1000, float(value) if abs(value) < 1e300 else 0, str(value)[:50]))
    if isinstance(value, str):
        return generator.choice((value + value, value[:-1], value.upper(), value + generator.choice(TEXTS), [value]))
    return generator.choice(([value], {"a": value}))


def another_token(generator: random.Random, data: bytes) -> bytes:
    """Put a token in the place of a value, or anywhere."""
    text = data.decode("utf-8", "replace")
    spots = list(VALUE.finditer(text[: 2**16]))
    token = generator.choice(TOKENS)
    if spots and generator.random() < 0.6:
        spot = generator.choice(spots)
        start, end = spot.span()
    else:
        start = end = generator.randrange(len(text) + 1)
    return (text[:start] + token + text[end:]).encode("utf-8", "surrogatepass")


def other_lines(generator: random.Random, data: bytes, other: bytes) -> bytes:
    """Repeat, drop or move lines, or take some from another input."""
    lines, more = data.split(b"\n"), other.split(b"\n")
    first, second = (sorted((generator.randrange(len(lines) + 1), generator.randrange(len(lines) + 1)))) if lines else (0, 0)
    way = generator.random()
    if way < 0.3:
        del lines[first:second]
    elif way < 0.6:
        lines[first:first] = lines[first:second]
    else:
        start = generator.randrange(len(more))
        lines[first:second] = more[start : start + generator.randrange(1, 10)]
    return b"\n".join(lines)


def other_bytes(generator: random.Random, data: bytes, other: bytes) -> bytes:
    """Change, drop or repeat bytes, cut, or go on with another input."""
    if not data:
        return generator.randbytes(generator.randrange(40))
    buffer, at, way = bytearray(data), generator.randrange(len(data)), generator.random()
    if way < 0.45:
        buffer[at] = generator.choice((0, 1, 127, 128, 255, buffer[at] ^ 1 << generator.randrange(8)))
    elif way < 0.6:
        width = generator.choice((2, 4, 8))
        buffer[at : at + width] = (generator.choice(NUMBERS[:9]) % 2 ** (8 * width)).to_bytes(width, "little")
    elif way < 0.75:
        del buffer[at : at + generator.randrange(1, 30)]
    elif way < 0.85:
        buffer[at:at] = buffer[: generator.randrange(1, 100)]
    elif way < 0.93:
        del buffer[at:]
    else:
        buffer[at:] = other[generator.randrange(len(other)) :] if other else b""
    return bytes(buffer)
