"""Private names of torch's pipeline engine stand in one file, and our own engine has none of torch's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import thinwire
from thinwire.pipeline import own_engine

PIPELINE = Path(thinwire.__file__).parent / "pipeline"
WITH_PRIVATE_NAMES = PIPELINE / "torch_engine.py"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def of_torch(text: str) -> set[str]:
    """List the private names of torch that a file imports, defines in the place of torch's, or asks things for."""
    tree = ast.parse(text)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {part for part in [*str(node.module).split("."), *(alias.name for alias in node.names)] if private(part)}
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".") if private(part)}
        elif isinstance(node, ast.Attribute) and private(node.attr):
            alone = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and node.attr in own
            found |= set() if alone else {node.attr}
    return found


def names_pipelining(text: str) -> bool:
    modules = [node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names]
    return any(module.startswith("torch.distributed.pipelining") for module in modules)


def test_what_the_private_names_are():
    found = of_torch(WITH_PRIVATE_NAMES.read_text())
    assert found == {"_Action", "_ComputationType", "_PipelineScheduleRuntime", "_prepare_schedule_with_comms"}
    assert names_pipelining(WITH_PRIVATE_NAMES.read_text())


def test_no_other_file_imports_the_pipeline_engine():
    others = [path for path in PIPELINE.parent.rglob("*.py") if path != WITH_PRIVATE_NAMES]
    assert len(others) > 100
    assert [path.name for path in others if names_pipelining(path.read_text())] == []


@pytest.mark.parametrize("name", ["own_engine", "engine", "engine_module", "order", "schedule", "backend", "boundary"])
def test_our_own_engine_and_all_that_it_stands_on_in_this_folder_use_public_names(name):
    assert of_torch((PIPELINE / f"{name}.py").read_text()) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        "from torch._C import Node",
        "from torch.autograd import _engine",
        "import torch._utils",
        "torch.autograd.graph._hooks()",
        "tensor._base",
    ],
)
def test_private_names_are_found(wrong):
    assert of_torch(f"{Path(own_engine.__file__).read_text()}\n{wrong}\n")
