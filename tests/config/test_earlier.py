"""The earlier form of an exchange, one text in [replicas], goes on working, and says how it is written now."""

from __future__ import annotations

import pytest

from thinwire.config.earlier import modern_arguments, modern_settings
from thinwire.config.options import options_from_spec
from thinwire.config.toml import flatten, from_toml, load_config, read_config, to_toml
from thinwire.run.command import parse_train


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


OLD = '[replicas]\ncount = 2\nexchange = "powersgd:rank=2,warmup=3"\n'
NEW = '[replicas]\ncount = 2\n\n[exchange]\nname = "powersgd"\nrank = 2\nwarmup = 3\n'


@pytest.mark.parametrize("form", [["--replicas.exchange", "{}"], ["--replicas.exchange={}"]])
@pytest.mark.parametrize(
    "text, now",
    [
        ("local", "--exchange.name local"),
        ("powersgd:rank=2,warmup=3", "--exchange.name powersgd --exchange.rank 2 --exchange.warmup 3"),
        ("hybrid:feedback=true", "--exchange.name hybrid --exchange.feedback true"),
        ("local:rate=1,packing=bf16", "--exchange.name local --exchange.rate 1 --exchange.packing bf16"),
    ],
)
def test_the_option_of_before_is_those_of_today(form, text, now, capsys):
    words = ["--replicas.count", "2", *(part.format(text) for part in form), "--seed", "4"]
    config = parse_train(words).config
    assert config.exchange == options_from_spec("exchange", text) and config.seed == 4
    assert capsys.readouterr().err == f"thinwire: note: --replicas.exchange {text} is now {now}\n"


def test_what_the_option_did_not_say_had_its_default_whatever_a_config_says(tmp_path):
    (tmp_path / "mine.toml").write_text(NEW)
    words = ["--config", "mine.toml", "--replicas.exchange", "powersgd:rank=1"]
    assert parse_train(words).config.exchange == options_from_spec("exchange", "powersgd:rank=1")


def test_a_command_line_of_today_is_left_as_it_is(capsys):
    words = ["--exchange.name", "local", "--exchange.steps=3", "--help"]
    assert modern_arguments(words) == words and capsys.readouterr().err == ""


def test_a_file_of_before_is_one_of_today_and_whose_it_is_is_told(tmp_path, capsys):
    (tmp_path / "old.toml").write_text(OLD)
    assert load_config("old.toml") == from_toml(NEW)
    told = 'old.toml: exchange = "powersgd:rank=2,warmup=3" in [replicas] is now [exchange] name = "powersgd", rank = 2, warmup = 3'
    assert capsys.readouterr().err == f"thinwire: note: {told}\n"
    assert read_config(tmp_path / "old.toml") == from_toml(OLD) == from_toml(NEW)
    assert capsys.readouterr().err == ""
    assert "replicas.exchange" not in flatten(from_toml(OLD)) and "[exchange]" in to_toml(from_toml(OLD))


@pytest.mark.parametrize("words", [[], ["--exchange.name", "powersgd"], ["--replicas.exchange", "powersgd:warmup=3,rank=2"]])
def test_a_run_of_before_resumes_with_either_form(tmp_path, words):
    run = tmp_path / "r"
    config = parse_train(["--run", str(run), "--replicas.count", "2", "--replicas.exchange", "powersgd:rank=2,warmup=3"]).config
    run.mkdir()
    text = to_toml(config)
    before, _, rest = text.partition("[exchange]")
    old = before.replace("[replicas]\n", '[replicas]\nexchange = "powersgd:rank=2,warmup=3"\n') + "[memory]" + rest.partition("[memory]")[2]
    assert "[exchange]" not in old
    (run / "config.toml").write_text(old)
    assert parse_train(["--run", "r", "--resume", *words]).config == config
    with pytest.raises(ValueError, match=r"its exchange.rank is 2, the command line gives 4"):
        parse_train(["--run", "r", "--resume", "--replicas.exchange", "powersgd:warmup=3"])


def test_both_forms_in_one_file_are_refused():
    with pytest.raises(ValueError, match=r"has both \[exchange\] and, in \[replicas\], exchange"):
        from_toml(OLD + '[exchange]\nname = "local"\n')


@pytest.mark.parametrize(
    "text, told",
    [
        ("gossip", "unknown exchange 'gossip'; did you mean powergossip"),
        ("local:stps=2", "the spec 'local:stps=2': exchange 'local' has no option 'stps'; did you mean steps"),
        ("local:steps=two", "the spec 'local:steps=two': exchange.steps is 'two'; it must be a whole number"),
        ("local:steps", "the spec 'local:steps' has 'steps' where OPTION=VALUE is expected"),
        ("", "the spec '' has no exchange"),
    ],
)
def test_what_cannot_be_is_refused(text, told):
    with pytest.raises(ValueError, match=told):
        modern_arguments(["--replicas.exchange", text])
    with pytest.raises(ValueError, match=told):
        from_toml(f'[replicas]\nexchange = "{text}"\n')


def test_settings_that_were_written_down_have_the_names_of_today():
    found = modern_settings({"seed": 1, "replicas.exchange": "powersgd:rank=2"})
    assert found == {"seed": 1, "exchange.name": "powersgd", "exchange.rank": 2, "exchange.warmup": 0}
    assert modern_settings({"seed": 1, "exchange.name": "local"}) == {"seed": 1, "exchange.name": "local"}
