"""The laws every exchange in the registry obeys, with its defaults and with those of its options that change when replicas talk."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from replicas.together import together
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.options import arguments_of, choose_options, options_from_spec, options_from_table, spec_of
from thinwire.config.registry import EXCHANGES
from thinwire.config.sections import ModelConfig, PipelineConfig, ReplicasConfig, RunConfig, TrainConfig
from thinwire.config.toml import from_toml, shared_hash, to_toml
from thinwire.model.cut import StagePlan
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.replicas.exchange import ExchangeOptions, make_exchange
from thinwire.replicas.peers import Peers
from thinwire.run.command import parse_train
from thinwire.util.device import choose_device

REPLICAS, STEPS = 3, 5
MODEL = ModelConfig(vocabulary=64, width=16, layers=1, heads=4, kv_heads=4, ffn=24, context=8)
CODEC = codec_defaults("dense")
TOLD = {"steps": 2, "warmup": 2}
"""Options that say when replicas talk, as they are tried besides the defaults."""


def options_of(name: str) -> set[str]:
    return {entry.name for entry in fields(EXCHANGES.load(name).Options)}


VARIANTS = [(name, {}) for name in EXCHANGES.names()]
VARIANTS += [(name, {option: value}) for name in EXCHANGES.names() for option, value in TOLD.items() if option in options_of(name)]
every_variant = pytest.mark.parametrize("name, options", VARIANTS, ids=lambda value: str(value))
every_name = pytest.mark.parametrize("name", EXCHANGES.names())


def config_of(name: str, options: dict, count: int = REPLICAS, graph: str = "complete") -> RunConfig:
    return RunConfig(
        seed=3,
        model=MODEL,
        train=TrainConfig(steps=STEPS, batch=count, warmup=0),
        pipeline=PipelineConfig(stages=1, microbatches=1),
        codec=CODEC,
        replicas=ReplicasConfig(count=count, graph=graph),
        exchange=options_from_table("exchange", {"name": name, **options}, "the law"),
    )


class Replica:
    """One copy of a stage that takes the steps of a trainer, with made gradients."""

    def __init__(self, config: RunConfig, peers: Peers) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            stage = Stage(MODEL, StagePlan(0, 1, range(1)), make_codec(CODEC, MODEL), 0, 0)
        self.stage = stage.to(choose_device(config.device))
        self.optimizer, self.peers = StageOptimizer(self.stage, config.train), peers
        self.named = {name: parameter.data for name, parameter in self.optimizer.named.items()}
        self.exchange = make_exchange(config, peers, self.optimizer.named)
        self.said, self.moments = hashlib.sha256(), []
        swap = peers.swap

        def heard(outgoing: dict[int, bytes]) -> dict[int, bytes]:
            for peer, data in sorted(outgoing.items()):
                self.said.update(f"{peer} {len(data)} ".encode() + data)
            return swap(outgoing)

        peers.swap = heard  # type: ignore[method-assign]

    def gradients(self, step: int) -> dict[str, Tensor]:
        """Return what this replica would learn: half of it is what all learn, half its own."""
        found = {}
        for name, tensor in self.named.items():
            made = [torch.Generator().manual_seed(1000 * step + number) for number in (0, 1 + self.peers.index)]
            found[name] = (sum(torch.randn(tensor.shape, generator=generator) for generator in made) / 2).to(tensor.device)
        return found

    def step(self, step: int) -> None:
        for name, gradient in self.gradients(step).items():
            self.optimizer.named[name].grad = gradient
        sent = self.peers.sent
        self.exchange.gradients({name: parameter.grad for name, parameter in self.optimizer.named.items()}, step)
        between = self.peers.sent
        self.optimizer.step(1.0, 1.0)
        self.exchange.commit()
        self.exchange.parameters(self.named, self.optimizer, step)
        self.exchange.commit()
        self.moments.append((between > sent, self.peers.sent > between))

    def run(self, steps: range) -> Replica:
        for step in steps:
            self.step(step)
        return self

    def resumed(self, config: RunConfig) -> Replica:
        """Return a replica that goes on from a checkpoint of this one."""
        other = Replica(config, self.peers)
        for name, tensor in other.named.items():
            tensor.copy_(self.named[name])
        other.optimizer.load_state_tensors({name: tensor.cpu().clone() for name, tensor in self.optimizer.state_tensors().items()})
        other.exchange.load_state(load(save({name: tensor.cpu() for name, tensor in self.exchange.state.items()})))
        return other


def trained(config: RunConfig) -> list[Replica]:
    return together(REPLICAS, lambda peers: Replica(config, peers).run(range(STEPS)), config.replicas.graph)


@every_variant
@pytest.mark.parametrize("graph", ["complete", "0-1,1-2"])
def test_all_replicas_end_with_one_model(name, options, graph):
    first, *others = trained(config_of(name, options, graph=graph))
    for other in others:
        for parameter, tensor in first.named.items():
            assert torch.equal(tensor, other.named[parameter]), parameter
    start = Replica(config_of(name, options, count=1), together(1, lambda peers: peers)[0]).named
    assert any(not torch.equal(tensor, start[parameter]) for parameter, tensor in first.named.items())


@every_variant
def test_bytes_are_sent_when_it_says_that_it_talks_and_only_then(name, options):
    for replica in trained(config_of(name, options)):
        told = [(replica.exchange.talks_before(step), replica.exchange.talks_after(step)) for step in range(STEPS)]
        assert replica.moments == told
        assert all(replica.exchange.meets(step) == any(told[step]) for step in range(STEPS))


@every_variant
def test_the_same_seed_says_the_same_bytes_and_another_gradient_others(name, options):
    config = config_of(name, options)
    once, again = ([replica.said.hexdigest() for replica in trained(config)] for _ in range(2))
    assert once == again and len(set(once)) == REPLICAS


@every_variant
@pytest.mark.parametrize("stop", [1, 3])
def test_the_state_survives_a_restart_to_the_bit(name, options, stop):
    config = config_of(name, options)

    def stopped(peers: Peers) -> Replica:
        return Replica(config, peers).run(range(stop)).resumed(config).run(range(stop, STEPS))

    for one, other in zip(trained(config), together(REPLICAS, stopped), strict=True):
        assert all(torch.equal(tensor, other.named[parameter]) for parameter, tensor in one.named.items())
        assert save(dict(one.exchange.state)) == save(dict(other.exchange.state))  # by their bits: nan is a value too


@every_variant
def test_a_step_that_is_not_committed_leaves_no_trace(name, options):
    config = config_of(name, options)

    def abandoned(peers: Peers) -> Replica:
        replica = Replica(config, peers).run(range(2))
        replica.exchange.gradients(replica.gradients(7), 2)  # a step that a lost worker ends: all go back to what was committed
        return replica.resumed(config).run(range(2, STEPS))

    for one, other in zip(trained(config), together(REPLICAS, abandoned), strict=True):
        assert all(torch.equal(tensor, other.named[parameter]) for parameter, tensor in one.named.items())


@every_variant
def test_a_state_with_a_gap_is_refused_by_name(name, options):
    config = config_of(name, options)

    def task(peers: Peers) -> None:
        state = dict(Replica(config, peers).run(range(1)).exchange.state)
        for label in state:
            with pytest.raises(ValueError, match="the checkpoint"):
                Replica(config, peers).exchange.load_state({other: tensor for other, tensor in state.items() if other != label})

    together(REPLICAS, task)


@every_variant
def test_alone_there_is_nothing_to_say(name, options):
    (replica,) = together(1, lambda peers: Replica(config_of(name, options, count=1), peers).run(range(STEPS)))
    assert replica.peers.sent == 0 and not replica.exchange.state and replica.exchange.meets(0)
    given = replica.gradients(STEPS)
    replica.exchange.gradients(given, STEPS)
    assert all(torch.equal(tensor, replica.gradients(STEPS)[parameter]) for parameter, tensor in given.items())


@every_name
def test_the_options_are_a_frozen_dataclass_whose_defaults_work_and_have_help(name):
    kind = EXCHANGES.load(name).Options
    assert issubclass(kind, ExchangeOptions) and kind.__dataclass_params__.frozen
    kind(name=name).check(config_of(name, {}))


@every_variant
def test_options_go_through_toml_the_command_line_and_a_spec(name, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(name, options)
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
    expected = {option: value for option, value in (("steps", 7), ("warmup", 3)) if option in options_of(name)}
    assert chosen == dataclasses.replace(EXCHANGES.load(name).Options(name=name), **expected)
