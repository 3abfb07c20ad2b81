"""Nothing in the package runs what it reads: no module imports or calls what could."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import thinwire

ROOT = Path(thinwire.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("yaml", "load"), ("jit", "load"), ("hub", "load")}


def offences(source: str) -> list[str]:
    """List what a source imports or calls that runs what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module and node.module.split(".")[0] in MODULES else []
            found += [alias.name for alias in node.names if (str(node.module).split(".")[-1], alias.name) in ATTRIBUTES]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in CALLS else []
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr if isinstance(node.value, ast.Attribute) else ""
            found += [f"{owner}.{node.attr}"] if (owner, node.attr) in ATTRIBUTES else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":  # numpy's own default is False
            found += [] if isinstance(node.value, ast.Constant) and node.value.value is False else ["allow_pickle"]
    return found


def test_the_package():
    for path in sorted(ROOT.rglob("*.py")):
        assert offences(path.read_text()) == [], path


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "load = torch.load",
        "eval('1')",
        "exec(code)",
        "__import__('pickle')",
        "numpy.load('x', allow_pickle=True)",
        "import shelve as s",
        "torch.jit.load('x')",
    ],
)
def test_the_search_itself(source):
    assert offences(source)
