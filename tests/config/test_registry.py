"""Names and what is behind them: built in, of other packages, registered; near misses for what is none."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from thinwire.config import registry
from thinwire.config.registry import Registry

ALL = [found for found in vars(registry).values() if isinstance(found, Registry)]


@pytest.fixture
def tools(monkeypatch) -> Registry:
    points = [EntryPoint("far", "thinwire.config.profiles:LinkProfile", "tools"), EntryPoint("lost", "no.such.module:Tool", "tools")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **chosen: EntryPoints(points).select(**chosen))
    return Registry("tool", "tools", {"near": ("thinwire.config.registry:Registry", "a tool at hand")})


@pytest.mark.parametrize("known", ALL, ids=lambda known: known.kind)
def test_every_built_in_name_is_there_and_has_help(known):
    for name, (place, text) in known.built_in.items():
        assert text == known.help(name) and "\n" not in text
        if known.kind != "tracker":  # those need packages of their own
            assert known.load(name).__name__ == place.partition(":")[2]
    assert set(known.names()) >= set(known.built_in)
    assert known.group == f"thinwire.{known.kind}s"


def test_names_are_those_built_in_of_other_packages_and_registered(tools):
    tools.register("mine", dict, "of this program")
    tools.register("place", "thinwire.config.registry:Registry")
    assert tools.names() == ["far", "lost", "mine", "near", "place"]
    assert [tools.load(name).__name__ for name in ("far", "mine", "near", "place")] == ["LinkProfile", "dict", "Registry", "Registry"]
    assert tools.help("near") == "a tool at hand" and tools.help("mine") == "of this program"
    assert tools.help("far") == "thinwire.config.profiles:LinkProfile"


@pytest.mark.parametrize("name", ["near", "far"])
def test_a_name_that_is_taken_is_not_registered(tools, name):
    with pytest.raises(ValueError, match=f"there is a tool '{name}' already; choose another name"):
        tools.register(name, dict)


def test_what_another_package_promises_and_does_not_hold_is_named(tools):
    with pytest.raises(
        ValueError, match=r"the tool 'lost' of another package, no\.such\.module:Tool, cannot be imported: No module named 'no'"
    ):
        tools.load("lost")


def test_an_unknown_name_is_refused_with_near_misses_and_all(tools):
    with pytest.raises(ValueError, match=r"unknown tool 'nera'; did you mean near\? choose one of far, lost, near"):
        tools.load("nera")
    with pytest.raises(ValueError, match="unknown tool 'zzz'; choose one of far, lost, near"):
        tools.load("zzz")


def test_naming_imports_nothing():
    code = "import sys; from thinwire.config.registry import CODECS, EXCHANGES; CODECS.names(), EXCHANGES.names()"
    code += "; print('torch' in sys.modules, [name for name in sys.modules if name.startswith('thinwire.') and 'config' not in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False []\n"
