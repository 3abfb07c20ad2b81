"""The strict device, built once, in this process and in those that it starts."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from device.strict_build import build, compiler


@pytest.fixture(scope="session")
def strict_package() -> Path:
    """Build the package of the device; return its folder."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler for the strict device")
    return build()


@pytest.fixture(scope="session")
def strict(strict_package) -> ModuleType:
    """Load the device into this process; return what counts its synchronisations."""
    sys.path.insert(0, str(strict_package))
    module = importlib.import_module("strict_device")
    module.register()
    assert torch.accelerator.current_accelerator() == torch.device("strict")
    return module


@pytest.fixture
def strict_workers(strict_package, monkeypatch) -> None:
    """Let processes that are started find the device."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(strict_package), *filter(None, [os.environ.get("PYTHONPATH")])]))
