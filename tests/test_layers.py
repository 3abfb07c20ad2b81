"""A layer imports only the layers below it; importing the package starts nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import thinwire

ROOT = Path(thinwire.__file__).parent
# From the bottom up. A module may import from its own layer and from those below.
LAYERS = [
    ["versions", "link.profile", "catalog", "mistakes"],
    ["config", "disk", "files", "lock", "shown", "noise", "model.cut", "specs", "replicas.graph", "replicas.peers"],
    ["memory.blocks", "memory.sizes", "memory.space", "memory.simulate", "memory.search", "memory.plan", "memory.show", "memory.picture"],
    ["model.stream", "model.initial", "model.llama", "data", "subspace", "link"],
    ["codecs"],
    ["model.stages"],
    ["optimizer", "replicas"],
    ["configfile", "limits", "stop", "hf.shards"],
    ["pipeline", "memory"],
    [
        "settings",
        "runfolder",
        "checkpoint",
        "track",
        "estimate",
        "verdict",
        "progress",
        "news",
        "farewell",
        "trackers",
        "seat",
        "places",
        "standby",
        "watch",
        "watchdog",
        "observe",
        "inputs",
    ],
    ["crew", "scratch", "cause"],
    ["summary", "sampling", "saved"],
    ["evaluate", "generate", "keys", "view", "memory.command"],
    ["restore", "keeping", "fork"],
    ["train", "last", "hf"],
    ["recover"],
    ["join"],
    ["launch", "harness"],
    ["training", "compare"],
    ["cli"],
]


# A verb that hands over to another one.
LAZY = {"evaluate": {"harness"}}


def layer_of(module: str) -> int:
    """Return the layer of a module named without the package, by its longest listed prefix."""
    matches = [(len(name), number) for number, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")]
    assert matches, f"{module} stands in no layer: add it to LAYERS"
    return max(matches)[1]


def imports(path: Path) -> set[str]:
    """List the package's modules that a file imports at any level."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("thinwire"):
            base = node.module.removeprefix("thinwire").strip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                is_module = (ROOT / (inner.replace(".", "/") + ".py")).exists()
                found.add(inner if is_module else base)
    return found - {"", "__version__"}


def test_imports_go_down():
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name in ("__init__.py", "__main__.py"):
            continue
        for target in imports(path) - LAZY.get(module, set()):
            assert layer_of(target) <= layer_of(module), f"{module} imports {target}, which lies above it"


def test_the_link_layer_knows_no_torch():
    for path in (ROOT / "link").rglob("*.py"):
        assert "import torch" not in path.read_text(), path


def test_only_the_pipeline_touches_torch_distributed():
    for path in ROOT.rglob("*.py"):
        if path.parent.name != "pipeline":
            assert "torch.distributed" not in path.read_text(), path


def test_codecs_and_mathematics_touch_no_socket_and_no_distributed():
    for folder in ("model", "subspace", "codecs"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert "torch.distributed" not in text and "import socket" not in text, path


def test_importing_the_package_starts_nothing():
    code = "import sys, threading, thinwire; print('torch' in sys.modules, threading.active_count())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "1"]
