"""One grammar for what is chosen by name: in TOML, on the command line and in a SPEC, with help and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import thinwire.config
from thinwire.config.command_line import parse_config
from thinwire.config.options import arguments_of, options_from_spec, options_from_table, spec_of
from thinwire.config.toml import from_toml, load_config


def test_three_ways_to_say_the_same():
    toml = from_toml('[exchange]\nname = "hybrid"\npreset = "zhybrid"\nhigh_rate = 8\nfeedback = true\n').exchange
    words = ["--exchange.name", "hybrid", "--exchange.preset", "zhybrid", "--exchange.high-rate", "8", "--exchange.feedback"]
    assert parse_config(words, load_config("laptop")).exchange == toml
    assert options_from_spec("exchange", "hybrid:preset=zhybrid,high_rate=8,feedback=true") == toml
    assert spec_of(toml) == "hybrid:preset=zhybrid,high_rate=8,feedback=true"


@pytest.mark.parametrize("section, spec", [("codec", "subspace:bits=8,rank=4"), ("exchange", "hybrid:feedback=true")])
def test_options_are_written_as_arguments_and_read_again(section, spec):
    options = options_from_spec(section, spec)
    assert getattr(parse_config(arguments_of(section, options), load_config("laptop")), section) == options
    assert spec_of(options) == spec


@pytest.mark.parametrize(
    "name, there, absent",
    [
        ("powersgd", ("--exchange.rank", "Columns of each factor"), "--exchange.packing"),
        ("local", ("--exchange.steps",), "--exchange.rank"),
    ],
)
def test_help_lists_the_options_of_the_chosen_exchange(name, there, absent, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_config(["--exchange.name", name, "--help"], load_config("laptop"))
    printed = capsys.readouterr().out
    assert caught.value.code == 0 and absent not in printed
    for text in (*there, "--codec.rank", "--exchange.name: allreduce, gravac, hybrid"):
        assert text in printed


@pytest.mark.parametrize(
    "words, told",
    [
        ("--exchange.name gossip", "unknown exchange 'gossip'; did you mean powergossip"),
        (
            "--exchange.rank 4",
            "the exchange 'allreduce' has no option 'rank'; it has name, packing; --exchange.rank is an option of powersgd, p",
        ),
        ("--exchange.name local --exchange.stps 4", "the exchange 'local' has no option 'stps'; it has name, steps, warmup"),
        (
            "--lifespan 4",
            "unknown option --lifespan; .*--codec.lifespan is an option of threshold.*--exchange.lifespan is an option of thr",
        ),
    ],
)
def test_what_an_exchange_does_not_have_is_refused_with_those_that_do(words, told):
    with pytest.raises(ValueError, match=told):
        parse_config(words.split(), load_config("laptop"))


@pytest.mark.parametrize(
    "table, told",
    [
        ({"name": "powersgd", "rank": "4"}, "here: exchange.rank is '4'; it must be a whole number"),
        ({"name": "powersgd", "rnk": 4}, "here: exchange 'powersgd' has no option 'rnk'; did you mean rank"),
        ({"name": 3}, "here: exchange.name is 3; it must be a text"),
        (3, r"here: exchange is 3; it must be a table, \[exchange\]"),
    ],
)
def test_a_table_that_cannot_be_is_refused(table, told):
    with pytest.raises(ValueError, match=told):
        options_from_table("exchange", table, "here")


def test_the_settings_are_read_without_torch():
    modules = sorted(path.stem for path in Path(thinwire.config.__file__).parent.glob("*.py"))
    code = f"import sys, importlib; [importlib.import_module('thinwire.config.' + name) for name in {modules}]"
    code += "; print({'torch', 'tyro', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
