"""A folder imports only folders before it; importing the package starts nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire

ROOT = Path(thinwire.__file__).parent
# One folder a line, from the bottom up.
LAYERS = [
    "util",
    "config",
    "bits",
    "link",
    "data",
    "model",
    "codecs",
    "optim",
    "replicas",
    "pipeline",
    "memory",
    "checkpoint",
    "metrics",
    "run",
    "cluster",
    "hf",
    "board",
    "testing",
    "cli",
]


def imported(path: Path) -> set[str]:
    """List the folders of the package that a file imports from, at any level."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = [node.module for node in nodes if node.module and node.module.startswith("thinwire.")]
    modules += [f"thinwire.{alias.name}" for node in nodes if node.module == "thinwire" for alias in node.names if alias.name in LAYERS]
    return {module.split(".")[1] for module in modules}


def test_every_folder_has_its_line():
    assert sorted(LAYERS) == sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__")


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_only_folders_before_it(folder):
    above = set(LAYERS[LAYERS.index(folder) + 1 :])
    for path in (ROOT / folder).rglob("*.py"):
        found = imported(path) & above
        assert not found, f"{path.relative_to(ROOT)} imports {', '.join(sorted(found))}, which stands above {folder}"


def test_the_link_layer_knows_no_torch():
    for path in (ROOT / "link").rglob("*.py"):
        assert "import torch" not in path.read_text(), path


def test_only_the_pipeline_touches_torch_distributed():
    for path in ROOT.rglob("*.py"):
        if path.parent.name != "pipeline":
            assert "torch.distributed" not in path.read_text(), path


def test_codecs_and_mathematics_touch_no_socket_and_no_distributed():
    for folder in ("bits", "model", "codecs"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert "torch.distributed" not in text and "import socket" not in text, path


def test_importing_the_package_starts_nothing():
    code = "import sys, threading, thinwire; print('torch' in sys.modules, threading.active_count())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "1"]
