"""What somebody else wrote, made fit to be shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.util.shown import shown


@pytest.mark.parametrize(
    "value, text",
    [
        ("plain words", "plain words"),
        ("Grüße, 世界", "Grüße, 世界"),
        ("a\x1b[2Jb\r\nc\x00\x7f", "a\\x1b[2Jb\\r\\nc\\x00\\x7f"),
        ("\u202egood\u2028", "\\u202egood\\u2028"),
        ("\ud800", "\\ud800"),
        ("x" * 300, "x" * 197 + "..."),
        ("\x00" * 300, ("\\x00" * 50)[:197] + "..."),
        ([1, "\x1b"], "[1, '\\x1b']"),
        (None, "None"),
    ],
)
def test_what_is_shown(value, text):
    assert shown(value) == text


def test_a_number_that_python_does_not_write_is_shown_too():
    assert shown(10**5000) == "a number of 16610 bits"


def test_what_is_nested_too_deeply_is_shown_too():
    value: list = []
    for _ in range(100_000):  # deeper than any release lets C code go
        value = [value]
    assert shown(value) == "a list that is nested too deeply"


@given(st.text(st.characters(exclude_categories=())), st.integers(3, 50))
def test_anything_is_printable_and_short(value, most):
    assert shown(value, most).isprintable() and len(shown(value, most)) <= most
