"""The laws every exchange in the registry obeys, and that a broken one is found; options in TOML, on the command line and in a spec."""

from __future__ import annotations

import dataclasses

import pytest

from thinwire.config.options import arguments_of, choose_options, options_from_spec, spec_of
from thinwire.config.registry import EXCHANGES
from thinwire.config.toml import from_toml, shared_hash, to_toml
from thinwire.replicas.exchange import Exchange, ExchangeOptions
from thinwire.replicas.local import Local
from thinwire.run.command import parse_train
from thinwire.testing import exchange_laws
from thinwire.testing.exchange_laws import GRAPHS, LAWS, config_of_variant, option_names, variants_of_exchanges
from thinwire.testing.laws import CPU, BrokenLaw

VARIANTS = variants_of_exchanges()
every_variant = pytest.mark.parametrize("name, options", VARIANTS, ids=lambda value: str(value))
every_name = pytest.mark.parametrize("name", EXCHANGES.names())


@every_variant
@pytest.mark.parametrize("law", LAWS)
def test_laws(name, options, law):
    LAWS[law](name, options)


@every_variant
def test_one_model_over_a_line_of_replicas(name, options):
    exchange_laws.all_end_with_one_model(name, options, CPU, GRAPHS[1])


@every_variant
def test_the_state_survives_a_later_restart(name, options):
    exchange_laws.state_survives_a_restart(name, options, CPU, stop=3)


class Deaf(Exchange):
    """Never learns of the others, and says that it does."""

    def talks_before(self, step):
        return True


class Forgetful(Local):
    """Takes any state for whole."""

    def load_state(self, state):
        self.state = dict(state)


@pytest.mark.parametrize("law, broken", [("one model", Deaf), ("talks when it says so", Deaf), ("gap", Forgetful)])
def test_a_broken_exchange_is_found(monkeypatch, law, broken):
    make = exchange_laws.make_exchange

    def made(*given):
        exchange = make(*given)
        exchange.__class__ = broken
        return exchange

    LAWS[law]("local", {})
    monkeypatch.setattr(exchange_laws, "make_exchange", made)
    with pytest.raises(BrokenLaw):
        LAWS[law]("local", {})


@every_name
def test_the_options_are_a_frozen_dataclass_whose_defaults_work_and_have_help(name):
    kind = EXCHANGES.load(name).Options
    assert issubclass(kind, ExchangeOptions) and kind.__dataclass_params__.frozen
    kind(name=name).check(config_of_variant(name, {}))


@every_variant
def test_options_go_through_toml_the_command_line_and_a_spec(name, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of_variant(name, options)
    assert from_toml(to_toml(config)) == config
    assert options_from_spec("exchange", spec_of(config.exchange)) == config.exchange
    words = ["--replicas.count", "2", "--train.batch", "64"]
    given = parse_train([*words, *arguments_of("exchange", config.exchange)]).config
    assert given.exchange == config.exchange
    before = parse_train([*words, "--replicas.exchange", spec_of(config.exchange)]).config
    assert before == given and shared_hash(before) == shared_hash(given)


@every_name
def test_another_choice_keeps_the_options_that_it_has_too(name):
    base = options_from_spec("exchange", "local:steps=7,warmup=3")
    chosen = choose_options("exchange", base, name)
    expected = {option: value for option, value in (("steps", 7), ("warmup", 3)) if option in option_names(name)}
    assert chosen == dataclasses.replace(EXCHANGES.load(name).Options(name=name), **expected)
