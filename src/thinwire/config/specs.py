"""Specs: one line of text names a method and its options, `NAME[:WORD=VALUE,...]`, such as `powersgd:rank=4`. A leaf, free of torch."""

from __future__ import annotations

import tomllib
from typing import Any


def split_spec(text: str, kind: str, form: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a spec; messages call its name a `kind` and show the `form`."""
    name, colon, listed = text.partition(":")
    if not name or (colon and not listed):
        raise ValueError(f"the spec {text!r} has no {'options after its colon' if name else kind}; write {form}")
    found: dict[str, Any] = {}
    for item in listed.split(",") if listed else ():
        word, equals, value = item.partition("=")
        if not (word and equals and value):
            raise ValueError(f"the spec {text!r} has {item!r} where WORD=VALUE is expected; write {form}")
        if word in found:
            raise ValueError(f"the spec {text!r} gives {word} twice; leave one out")
        found[word] = read_value(value)
    return name, found


def read_value(text: str) -> Any:
    """Read a value as TOML would, else as plain text; `none` unsets."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
