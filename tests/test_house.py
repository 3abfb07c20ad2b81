"""The size of files and functions, constructors that do not talk, and one meaning per public name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import thinwire

ROOT = Path(thinwire.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES, MOST_OF_A_FUNCTION = 400, 40
TALK = {"gather", "gather_values", "announce", "settle", "send", "receive", "recv", "post", "take", "open_links", "connect", "dial"}
"""Methods that send to a peer or wait for one."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_file_is_too_long():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= MOST_LINES, path


def test_no_function_is_too_long():
    found = set()
    for path in FILES:
        for node in functions(ast.parse(path.read_text())):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MOST_OF_A_FUNCTION:
                found.add(f"{path.relative_to(ROOT)}:{node.name}")
    assert not found


def test_no_constructor_talks_to_a_peer():
    found = set()
    for path in FILES:
        for node in functions(ast.parse(path.read_text())):
            if node.name in ("__init__", "__post_init__"):
                called = {call.func.attr for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)}
                found |= {f"{path.relative_to(ROOT)}:{name}" for name in called & TALK}
    assert not found


def test_a_public_name_means_one_thing():
    """Methods and the one `main` of a verb apart: they are read with the name of their class or verb."""
    defined = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and node.name != "main":
                defined[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in defined.items() if len(places) > 1}
    assert not twice
