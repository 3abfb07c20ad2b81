"""README and docs: every command runs or is on a reasoned list, tables agree with the code, quoted messages exist, links resolve.

A document's commands run in its order in one folder, so that later ones find the runs of earlier ones. They are made small: a tiny
config stands for the packaged ones, steps, sequences and new tokens are cut down, and runs without a name of their own get one.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from pages import ELSEWHERE, PAGES, ROOT, items_of
from test_layers import LAYERS
from test_plugin import install, install_exchange, install_tracker
from thinwire import api
from thinwire.board import cases
from thinwire.cli import main as cli
from thinwire.cluster.join_command import parse_join
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config import registry, toml
from thinwire.config.registry import CODECS, Registry
from thinwire.config.sections import ModelConfig, RunConfig
from thinwire.hf.plain import why_not_plain

PLACEHOLDER = re.compile(r"(^|[ /'=.])[A-Z]{1,}[A-Z_]*($|[ /'=.])|\.\.\.")
"""A word to fill in, such as RUN or FILE: what it stands in is a form, whose words are checked."""
PLUGINS = {"writing_a_codec.md": [install], "extending.md": [install_exchange, install_tracker]}
"""Pages of what another package adds: their blocks of Python are installed as packages, and their commands find them there."""
TINY = """
[model]
vocabulary = 300
width = 32
layers = 8
heads = 4
kv_heads = 2
ffn = 48
context = 16
[data]
source = {source}
cache = {cache}
[train]
steps = 2
batch = 16
warmup = 1
checkpoint_every = 0
validate_every = 0
validation_sequences = 4
[pipeline]
stages = 2
microbatches = 4
mode = "inprocess"
[codec]
name = "subspace"
rank = 6
"""
SMALLER = {
    "--train.steps": "2",
    "--steps": "2",
    "--train.warmup": "1",
    "--train.validation_sequences": "4",
    "--train.validate_every": "1",
    "--sequences": "4",
    "--max-new-tokens": "4",
    "--model.context": "16",
    "--speed-steps": "3",
    "--train.seconds": "60",
}
"""Values put in the place of larger ones."""


@cache
def makefile_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def extras() -> frozenset[str]:
    return frozenset(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def check_make(text: str) -> None:
    """Every target of a `make` command is in the Makefile."""
    targets = [word for word in shlex.split(text)[1:] if "=" not in word]
    assert targets and set(targets) <= makefile_targets(), text


def check_script(text: str) -> None:
    """A bench script is there and is Python; each is too long to run here."""
    words = shlex.split(text)
    script = ROOT / "bench" / words[2] / "__main__.py" if words[1] == "-m" else ROOT / words[1]
    ast.parse(script.read_text())


def check_pip(text: str) -> None:
    """What pip is to install is this project, with extras that it has, or a package that the code tells people to install."""
    words = [word for word in shlex.split(text)[2:] if not word.startswith("-") and word != "constraints.txt"]
    assert "-c constraints.txt" in text, f"{text}: what the tests did not run with may be installed"
    for word in words:
        name, _, names = word.rstrip("]").partition("[")
        assert name in ("thinwire", ".", "lm_eval"), text
        assert name == "lm_eval" or set(filter(None, names.split(","))) <= extras(), text


def check_venv(text: str) -> None:
    """The virtual environment that people make is the one that `make` uses."""
    assert text == f"python3 -m venv {re.search(r'^VENV *:= *(.+)$', (ROOT / 'Makefile').read_text(), re.MULTILINE)[1]}", text


def check_viewer(text: str) -> None:
    """A viewer belongs to an extra; it starts a server, so it is not run."""
    assert {"tensorboard": "track", "trackio": "trackio"}[text.split()[0]] in extras()


def check_folder(text: str) -> None:
    """`cd FOLDER && ...`: the folder is there; what follows is checked by itself."""
    folder, _, rest = text.removeprefix("cd ").partition(" && ")
    assert folder == "thinwire" or (ROOT / folder).is_dir(), text
    if rest:
        check_script(rest.replace("../", ""))


def check_path(text: str) -> None:
    """The one variable that is set is the path to the commands that `make install` makes."""
    assert text == 'export PATH="$PWD/.venv/bin:$PATH"', text


LISTED: dict[str, Callable[[str], None]] = {
    "make": check_make,
    ".venv/bin/python": check_script,
    "pip": check_pip,
    "python3": check_venv,
    "tensorboard": check_viewer,
    "trackio": check_viewer,
    "git": lambda text: None,  # `git clone URL`: the network is not for tests
    "cd": check_folder,
    "export": check_path,
}
"""Programs that are not run here, and what is checked instead."""


@cache
def flags_of(verb: str) -> frozenset[str]:
    """Return the words of a verb, as its own help lists them; some verbs take those of `train` as well."""
    page = StringIO()
    with redirect_stdout(page), suppress(SystemExit):
        cli.main([verb, "--help"])
    own = frozenset(flag.replace("_", "-") for flag in re.findall(r"--[a-z][\w.-]*", page.getvalue()))
    return own | flags_of("train") if verb in ("join", "import", "compare", "memory") else own


def check_form(text: str) -> None:
    """A command with words to fill in: the verb exists, and so do its words; codec options belong to some codec."""
    _, verb, *words = text.split()
    options = {f"--codec.{entry.name}" for name in CODECS.built_in for entry in dataclasses.fields(CODECS.load(name).Options)}
    assert verb in cli.VERBS, text
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            assert flag.replace("_", "-") in flags_of(verb) or flag in options, f"{text}: {flag}"


def check_apart(text: str) -> None:
    """A line that needs a machine of its own: its verb understands it; test_join.py and test_generate.py run some."""
    verb, *words = shlex.split(ELSEWHERE.sub("", text))[1:]
    if verb in ("export", "eval", "generate"):
        check_form(f"thinwire {verb} RUN {shlex.join(words[1:])}")
        return
    assert verb == "join", text
    command = parse_join(words)
    assert command.stage is None or command.stage < command.config.pipeline.stages


class Runner:
    """Run the commands of a page in one folder."""

    def __init__(self, folder: Path, config: str) -> None:
        self.folder, self.config, self.count = folder, config, 0
        self.redraws = False
        """Whether the command under way draws a board of the project again: its rows are of the packaged config."""
        for name in ("alice", "bob", "carol"):
            assert cli.main(["keys", str(folder / name)]) == 0
        (folder / "books").mkdir()
        shutil.copyfile(Path(config).parent / "text.txt", folder / "books" / "one.txt")
        for boards in ("scoreboard", "exchanges"):
            shutil.copytree(ROOT / "docs" / boards, folder / "docs" / boards, ignore=shutil.ignore_patterns("plots", "runs"))

    def smaller(self, words: list[str]) -> list[str]:
        """Return the words of a command, made small."""
        verb, self.redraws = words[0], False
        if verb == "compare" and any(word.startswith("@docs/") for word in words):
            assert words[words.index("--out") + 1].startswith("docs/"), "the project's own boards are not in the default folder"
            self.redraws = True
            return [*words, *([] if "--redraw" in words else ["--redraw"])]  # hours of rows are there: they are drawn again
        made = list(words)
        for index, word in enumerate(words[:-1]):
            if word in SMALLER:
                made[index + 1] = SMALLER[word]
            elif word == "--config":
                made[index + 1] = self.config
        if verb in ("train", "import", "compare") and "--config" not in words and not {"--resume", "--from"} & {*words}:
            made += ["--config", self.config]
        if verb == "train" and "--run" not in words:
            self.count += 1
            made += ["--run", f"runs/unnamed-{self.count}"]
        if {"--link.profile", "--replicas.count"} & {*words} and "--pipeline.mode" not in words:
            made += ["--pipeline.mode", "workers"]
        if "--resume" in words:
            made += ["--train.steps", "3"]  # one more than before; of two values the last counts
        if verb in ("eval", "export") and "--sequences" not in words:
            made += ["--sequences", "4"]
        if verb == "generate" and "--max-new-tokens" not in words:
            made += ["--max-new-tokens", "4"]
        if verb == "compare":
            assert "--out" not in words or not words[words.index("--out") + 1].startswith("docs"), "there are the rows of another machine"
            made += ["--speed-steps", "3", "--train.batch", "4", "--pipeline.microbatches", "2", "--train.validate_every", "1"]
        return one_link(made)

    def run(self, text: str) -> None:
        """Run a `thinwire` command to its end."""
        words = self.smaller(shlex.split(text)[1:])
        try:
            code = cli.main(words)
        except SystemExit as end:  # --help
            code = end.code
        assert code == 0, f"{text}\nrun as: thinwire {shlex.join(words)}"


def one_link(words: list[str]) -> list[str]:
    """Keep the first of several links."""
    if "--links" not in words:
        return words
    start = words.index("--links") + 1
    stop = next((index for index in range(start, len(words)) if words[index].startswith("--")), len(words))
    return words[: start + 1] + words[stop:]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """Write the tiny config and its text; return the config's path."""
    folder = tmp_path_factory.mktemp("tiny")
    lines = (f"{number} plus {number % 7} is {number + number % 7}, said the {number % 5} of them.\n" for number in range(600))
    (folder / "text.txt").write_text("".join(lines))
    source, place = json.dumps(str(folder / "text.txt")), json.dumps(str(folder / "cache"))
    (folder / "tiny.toml").write_text(TINY.format(source=source, cache=place))
    return str(folder / "tiny.toml")


FIRST = {"README.md", "quickstart.md", "two_machines.md"}
"""Pages whose commands every run of the tests tries; those of the others are among the long ones."""


@pytest.mark.parametrize("page", [pytest.param(page, marks=[] if page.name in FIRST else pytest.mark.full, id=page.name) for page in PAGES])
def test_every_command_runs_or_is_listed(page, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, done, names = Runner(tmp_path, tiny), set(), {"__name__": page.stem}
    packaged = toml.load_config
    for module in (api, cases):  # the config of a name that comes with the package is the tiny one
        monkeypatch.setattr(module, "load_config", lambda name: packaged(name if name.endswith(".toml") or runner.redraws else tiny))
    for put in PLUGINS.get(page.name, []):
        put(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    for item in items_of(page):
        if item in done:
            continue
        done.add(item)
        program = item.text.split()[0]
        if item.kind == "python":
            if page.name not in PLUGINS:
                exec(compile(item.text, page.name, "exec"), names)
        elif ELSEWHERE.match(item.text):
            check_apart(item.text)
        elif program in LISTED:
            LISTED[program](item.text)
        elif program != "thinwire":
            pytest.fail(f"{page.name}: {item.text!r} is neither run nor listed")
        elif len(item.text.split()) == 2 and item.text.split()[1] in cli.VERBS:
            continue  # the name of a verb
        elif PLACEHOLDER.search(item.text) or "--tasks" in item.text.split():  # tasks need the LM Evaluation Harness, no part of us
            check_form(item.text)
        else:
            runner.run(item.text)


def test_commands_are_found_where_people_see_them():
    found = {page.name: [item.text for item in items_of(page)] for page in PAGES}
    assert "make demo" in found["README.md"] and "thinwire eval runs/first" in found["README.md"]
    assert "thinwire train --track tensorboard" in found["README.md"]
    assert sum(text.startswith("alice$") for text in found["two_machines.md"]) == 3
    assert len(found["quickstart.md"]) >= 10 and any(item.kind == "python" for item in items_of(ROOT / "docs" / "quickstart.md"))


@pytest.mark.parametrize("text", ["thinwire trane RUN", "thinwire train --codec.rnk K", "thinwire generate RUN --prmpt TEXT"])
def test_a_form_with_a_wrong_word_is_noticed(text):
    with pytest.raises(AssertionError):
        check_form(text)


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)), f"{page.name}: {target}"


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_file_map_has_every_folder_from_the_bottom_up():
    lines = re.findall(r"^\| `(\w+)/` \| \S", ARCHITECTURE.partition("## File map")[2], re.MULTILINE)
    assert lines == LAYERS


@pytest.mark.parametrize("page", ["architecture.md", "extending.md"])
def test_files_that_are_named_are_there(page):
    """Names are those below src/thinwire, or begin at the root."""
    named = re.findall(r"`((?:\w+/)+(?:[\w.]+\.\w+)?|\w+\.py)`", (ROOT / "docs" / page).read_text())
    assert len(named) > 10
    for name in named:
        assert (ROOT / "src" / "thinwire" / name).exists() or (ROOT / name).exists(), name


def test_every_kind_that_can_be_registered_is_in_extending():
    page = (ROOT / "docs" / "extending.md").read_text()
    for kind in (found for found in vars(registry).values() if isinstance(found, Registry)):
        assert re.search(rf"^\| {kind.kind} \| `{kind.group}` \|", page, re.MULTILINE), kind.kind
        assert f"\n## A{'n' if kind.kind[0] in 'ae' else ''} {kind.kind}\n" in page, kind.kind


def test_figures_of_the_readme_are_those_of_results():
    table = (ROOT / "README.md").read_text().partition("## Results")[2].partition("## ")[0]
    figures = re.findall(r"\d[\d,.]*\d(?:e-\d)?(?: %|x| s\b)?", table)
    assert len(figures) > 12
    for figure in figures:
        assert figure in (ROOT / "docs" / "results.md").read_text(), figure


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_toml_blocks_are_toml(page):
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        tomllib.loads(block)


CODECS_PAGE = (ROOT / "docs" / "codecs.md").read_text()


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of all tables by the `code` in their first cell."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize("name", CODECS.built_in)
def test_the_table_of_codecs_agrees_with_the_code(name):
    (row,) = re.findall(rf"^\| `{name}` \|.*$", CODECS_PAGE.partition("## Options that all have")[0], re.MULTILINE)
    *_, forward, backward, llama = (cell.strip() for cell in row.strip("|").split("|"))
    options, model = codec_defaults(name), ModelConfig()
    spec = make_codec(options, model).spec(2, model.context)
    assert (float(forward), float(backward)) == tuple(round(spec.bytes_per_token(way)) for way in ("forward", "backward"))
    assert (llama == "yes") == (why_not_plain(RunConfig(codec=options)) is None)


@pytest.mark.parametrize("name", CODECS.built_in)
def test_every_option_of_a_codec_is_listed_with_its_default(name):
    own = rows(re.split(r"^##+ ", CODECS_PAGE.partition(f"\n### {name}\n")[2], flags=re.MULTILINE)[0])
    common = rows(CODECS_PAGE.partition("## Options that all have")[2].partition("## One by one")[0])
    known = {entry.name: entry for entry in dataclasses.fields(CODECS.load(name).Options)}
    assert set(own) <= set(known), "an option that is gone"
    for option, entry in known.items():
        default = "" if entry.default is dataclasses.MISSING else "unset" if entry.default is None else str(entry.default)
        assert (own.get(option) or common[option])[0] == default, f"{name}: {option}"


def test_figures_of_codecs_are_those_of_scoreboard_and_log():
    sources = "".join((ROOT / "docs" / name).read_text() for name in ("scoreboard.md", "log.md"))
    evidence = CODECS_PAGE.partition("## One by one")[2]
    for figure in re.findall(r"[+-]\d+\.\d+ %|\d+\.\d+x|\d+,\d{3},\d{3}", evidence):
        assert figure in sources, figure


@cache
def source_texts() -> str:
    """Return every text of the sources, a value in it as one NUL, one per line."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in texts)


def test_quoted_messages_are_in_the_sources():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 40
    texts = source_texts()
    for message in messages:
        pattern = "[^\n]*?".join(re.escape(piece) for piece in re.split(r"\.\.\.(?!\.)", message))
        assert re.search(pattern, texts), message
