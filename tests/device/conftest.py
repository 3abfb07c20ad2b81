"""The strict device, built once, and loaded into this process where a test asks for it."""

from __future__ import annotations

import importlib
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
