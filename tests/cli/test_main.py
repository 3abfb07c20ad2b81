"""The command: table of verbs, lazy imports, exit codes."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import types
from contextlib import suppress
from pathlib import Path

import pytest

from patience import HANG
from thinwire import __version__
from thinwire.cli import main as cli
from thinwire.util import versions


def install_verb(monkeypatch: pytest.MonkeyPatch, action) -> None:
    module = types.ModuleType("thinwire_verb_under_test")
    module.main = action
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.VERBS, "probe", ("a verb of this test", f"{module.__name__}:main"))


def refuse(argv):
    raise ValueError("rank 300 is above the width 256; lower --codec.rank")


def interrupt(argv):
    raise KeyboardInterrupt


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_verb(argv, capsys):
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    for verb, (help_line, _) in cli.VERBS.items():
        assert f"  {verb}" in printed
        assert help_line in printed


def test_help_lists_what_can_be_named(capsys):
    from thinwire.config.profiles import PROFILES
    from thinwire.config.registry import CODECS, EXCHANGES
    from thinwire.config.toml import packaged

    for argv in (["--help"], ["train", "--help"]):
        with suppress(SystemExit):
            cli.main(argv)
        printed = " ".join(capsys.readouterr().out.split())
        named = {
            "--codec.name": CODECS.names(),
            "--exchange.name": EXCHANGES.names(),
            "--link.profile": PROFILES,
            "--config": packaged(),
        }
        for word, names in named.items():
            assert re.search(rf"{re.escape(word)}:? {re.escape(', '.join(names))}", printed), (argv, word)


@pytest.mark.parametrize(
    "word, hint",
    [
        ("--rank", "did you mean --adapter.rank or --codec.rank?"),
        ("--steps", "did you mean --train.steps?"),
        ("--dtype", "did you mean --codec.dtype or --train.dtype?"),
        ("--train.rank", "did you mean --adapter.rank or --codec.rank?"),
        ("--stagse", "did you mean --pipeline.stages?"),
        ("--train.step", "did you mean --train.steps?"),
        ("--buckets", "--codec.buckets is an option of anchored, nothing: choose one with --codec.name"),
    ],
)
def test_a_word_without_its_section_names_the_whole_word(capsys, word, hint):
    assert cli.main(["train", "--config", "laptop", word, "8"]) == 2
    error = capsys.readouterr().err
    assert f"unknown option {word}; " in error and hint in error


def test_an_option_of_another_codec_names_that_codec(capsys):
    assert cli.main(["train", "--codec.name", "dense", "--codec.rank", "8"]) == 2
    error = capsys.readouterr().err
    assert "the codec 'dense' has no option 'rank'" in error and "--codec.rank is an option of subspace, anchored" in error


@pytest.mark.parametrize("verb", [["train"], ["memory"], ["eval", "run"], ["join", "roster.toml", "--stage", "0"]])
def test_a_pattern_that_the_shell_expanded_says_quote_it(tmp_path, monkeypatch, capsys, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for name in "abcd":
        (tmp_path / f"books/{name}.txt").write_text("text")
    files = [f"books/{name}.txt" for name in "abcd"]
    assert cli.main([*verb, "--data.source", *files]) == 2
    error = capsys.readouterr().err
    assert "--data.source takes one value and is followed by 4: books/a.txt, books/b.txt, books/c.txt, ...; " in error
    assert "the shell has expanded a pattern: quote it, such as --data.source 'books/*.txt'" in error


def test_a_prompt_of_several_words_says_quote_it(capsys):
    assert cli.main(["generate", "run", "--prompt", "def", "main("]) == 2
    assert "quote it if it is one text: --prompt 'def main('" in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"thinwire {__version__}\n"


def test_unknown_verb_names_the_near_one(capsys):
    assert cli.main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "thinwire: error: there is no verb 'trian'; did you mean 'train'?" in captured.err


def test_unknown_verb_without_a_near_one_lists_all(capsys):
    assert cli.main(["xyzzy"]) == 2
    assert "the verbs are train, keys, roster, join, eval" in capsys.readouterr().err


@pytest.mark.parametrize("returned, code", [(None, 0), (0, 0), (3, 3)])
def test_a_verb_gets_its_words_and_sets_the_exit_code(monkeypatch, returned, code):
    seen = []

    def verb(argv):
        seen.append(argv)
        return returned

    install_verb(monkeypatch, verb)
    assert cli.main(["probe", "--seed", "3"]) == code
    assert seen == [["--seed", "3"]]


def test_value_error_becomes_one_line_without_traceback(monkeypatch, capsys):
    install_verb(monkeypatch, refuse)
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "thinwire: error: rank 300 is above the width 256; lower --codec.rank\n"


def test_a_defect_keeps_its_traceback(monkeypatch):
    install_verb(monkeypatch, lambda argv: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_interrupt_exits_130(monkeypatch):
    install_verb(monkeypatch, interrupt)
    assert cli.main(["probe"]) == 130


def loaded_by(code: str) -> set[str]:
    """Return the packages that a new interpreter has loaded after some code."""
    code += "; import sys; print(sorted(module.split('.')[0] for module in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=True)
    return set(ast.literal_eval(result.stdout.splitlines()[-1]))


def test_help_imports_nothing_heavy():
    """A terminal shows the help at once because nothing of others, and little of Python's own library, is loaded for it."""
    loaded = loaded_by("from thinwire.cli.main import main; main(['--help'])") - loaded_by("pass")
    assert loaded - sys.stdlib_module_names == {"thinwire"}
    assert not loaded & {"asyncio", "logging", "multiprocessing", "ssl", "tomllib", "unittest"}


def with_torch(folder: Path, version: str | None) -> dict[str, str]:
    """Return an environment whose torch is of another version, and says so when it is imported."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise SystemExit('torch was imported')")
    if version is not None:
        about = folder / f"torch-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def thinwire(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "thinwire", *words], capture_output=True, text=True, timeout=HANG, env=environment)


@pytest.mark.parametrize("version", ["2.9.1", "2.11.0+cpu", "2.16.0", "2.16.0a0+git1234", "3.0"])
def test_a_torch_that_is_not_known_is_named_before_it_is_imported(tmp_path, version):
    environment = with_torch(tmp_path, version)
    first, second = thinwire(["train", "--help"], environment).stderr.splitlines()
    assert first.startswith(f"thinwire: torch {version} is installed, this release of thinwire knows 2.12 to 2.15: it goes on with ")
    assert "pip install -c constraints.txt" in first and second == "torch was imported"
    assert thinwire(["--help"], environment).stderr == thinwire(["keys", str(tmp_path / "keys")], environment).stderr == ""


@pytest.mark.parametrize("version", ["2.12.0", "2.13.1+cu130", "2.14.2", "2.15.0"])
def test_a_torch_of_the_range_is_imported(tmp_path, version):
    assert thinwire(["train", "--help"], with_torch(tmp_path, version)).stderr == "torch was imported\n"


def test_the_range_of_torch_is_that_of_the_project_and_holds_the_pinned_one():
    root = Path(__file__).parents[2]
    needed = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    (major, newest), oldest = max(versions.KNOWN), versions.written(min(versions.KNOWN))
    assert f"torch>={oldest},<{versions.written((major, newest + 1))}" in needed
    (pinned,) = re.findall(r"^torch==(\S+)", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert versions.KNOWN[versions.release(pinned)] == "torch"


@pytest.mark.parametrize(
    "installed, engine",
    [("2.13.1", "torch"), ("2.12.1", "own"), ("2.14.0+cu130", "torch"), ("2.11.0", "own"), ("2.15.0", "own"), ("?", "own")],
)
def test_the_engine_follows_the_installed_torch(installed, engine):
    assert versions.choose_engine("auto", installed) == engine
    assert versions.choose_engine("own", installed) == "own"
    if engine == "torch":
        assert versions.choose_engine("torch", installed) == "torch"
    else:
        with pytest.raises(
            ValueError, match=re.escape(f"works with torch 2.13, 2.14, and {installed} is installed; set pipeline.engine to auto")
        ):
            versions.choose_engine("torch", installed)


def test_import_starts_nothing():
    code = "import sys, threading, thinwire; print(threading.active_count(), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=True)
    assert result.stdout == "1 False\n"


RESOLVE = """
import importlib, os, sys
targets = [target.split(":") for target in sys.argv[1:]]
for module, _ in targets:
    importlib.import_module(module)
for name in [name for name in sys.modules if name.partition(".")[0] == "thinwire"]:
    del sys.modules[name]  # what others wrote stays loaded
for module, function in targets:
    child = os.fork()  # in which it is the first module of thinwire
    if not child:
        os._exit(0 if callable(getattr(importlib.import_module(module), function)) else 1)
    assert os.waitpid(child, 0)[1] == 0, module
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_verb_resolves():
    targets = [target for _, target in cli.VERBS.values()]
    subprocess.run([sys.executable, "-c", RESOLVE, *targets], timeout=HANG, check=True)


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    code = "import sys; from thinwire.cli import main as cli; cli.VERBS['shout'] = ('', 'shout:main'); sys.exit(cli.main(['shout']))"
    (tmp_path / "shout.py").write_text("def main(words):\n    for _ in range(100_000):\n        print('more')\n")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout.readline() == "more\n"
    process.stdout.close()
    assert process.wait(HANG) == 141 and process.stderr.read() == ""
