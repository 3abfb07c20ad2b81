"""Build the device `strict` from source, once for each text of its source and each torch: a package that torch loads by itself."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = [Path(__file__).with_name(name) for name in ("strict_device.cpp", "strict_device.py")]


def compiler() -> str | None:
    """Return the C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build() -> Path:
    """Return the folder of the package, built if need be."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.platform}".encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    root = Path(cpp_extension.get_default_build_root())
    folder = root / f"thinwire_strict_{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as made:
        package = Path(made) / "package"
        package.mkdir()
        compile_into(package / "libstrict_device.so")
        shutil.copy(SOURCES[1], package)
        facts = package / "strict_device-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: strict-device\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text("[torch.backends]\nstrict = strict_device:register\n")
        try:
            package.rename(folder)
        except OSError:  # another process was faster
            assert folder.exists()
    return folder


def compile_into(library: Path) -> None:
    """Compile the library; its symbols are those of the torch that is installed."""
    paths = [f"-I{path}" for path in cpp_extension.include_paths()]
    for path in cpp_extension.library_paths():
        paths += [f"-L{path}", f"-Wl,-rpath,{path}"]
    command = [compiler() or "c++", "-std=c++20", "-O1", "-fPIC", "-shared", *paths, str(SOURCES[0]), "-ltorch_cpu", "-lc10", "-o"]
    done = subprocess.run([*command, str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
