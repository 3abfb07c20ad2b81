"""Wheel and sdist: what is in them, what they say of themselves, and that the wheel alone trains. Nothing is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import thinwire
from pages import ROOT
from runs import write_config

EXTRAS = "transformers datasets huggingface_hub matplotlib tensorboard trackio zfpy pytest hypothesis"
"""Modules that only an extra brings."""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Build wheel and sdist."""
    pytest.importorskip("hatchling", reason="the build backend is not installed (extra dev)")
    folder = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """Install the wheel alone into an environment that borrows its dependencies, but no extra, from this one; return its programs."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=os.name != "nt")
    paths = sysconfig.get_paths("venv", vars={"base": str(place), "platbase": str(place)})
    python, site = Path(paths["scripts"]) / Path(sys.executable).name, Path(paths["purelib"])
    words = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet", str(built[0])]
    subprocess.run(words, check=True, capture_output=True)
    (site / "borrowed.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({EXTRAS.split()})\n")
    return Path(paths["scripts"])


@pytest.mark.full
def test_what_is_in_them(built):
    wheel, sdist = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = HeaderParser().parsestr(archive.read(next(name for name in names if name.endswith("METADATA"))).decode())
    sources = {f"thinwire/{path.relative_to(ROOT / 'src/thinwire').as_posix()}" for path in (ROOT / "src/thinwire").rglob("*.*")}
    assert {name for name in sources if "__pycache__" not in name} <= names and "thinwire/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"thinwire"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Version"] == thinwire.__version__ and metadata["Requires-Python"] == project["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata.get_payload().startswith("# thinwire")
    assert metadata.get_all("Classifier") == project["classifiers"] and metadata["License-Expression"] == "Apache-2.0"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "CHANGELOG.md", "Dockerfile", "src/thinwire/py.typed", "tests/test_package.py"} <= inside


@pytest.mark.full
def test_the_wheel_alone_trains(installed, tmp_path):
    config = write_config(tmp_path, tmp_path / "cache")
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for mode in ("inprocess", "workers"):
        words = [str(installed / "thinwire"), "train", "--config", config, "--run", mode, "--train.steps", "2", "--pipeline.mode", mode]
        subprocess.run(words, cwd=tmp_path, env=given, check=True, capture_output=True)
        assert (tmp_path / mode / "summary.json").exists()
    selftest = subprocess.run(
        [installed / "thinwire", "selftest", "--device", "cpu"], cwd=tmp_path, env=given, capture_output=True, text=True
    )
    assert selftest.returncode == 0, selftest.stdout + selftest.stderr
    code = "import thinwire; print(thinwire.__file__)"
    where = subprocess.run([installed / "python", "-c", code], cwd=tmp_path, env=given, check=True, capture_output=True, text=True).stdout
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_the_release_notes_have_this_version():
    assert f"\n## [{thinwire.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "src/thinwire/py.typed").exists()
