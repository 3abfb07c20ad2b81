"""The laws every exchange in the registry obeys, with its defaults and with options that change when replicas talk; on any device.

Each takes the name of an exchange and a variant of its options, and raises BrokenLaw. Replicas are threads of this process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields

import torch
from safetensors import torch as safetensors_torch
from torch import Tensor

from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.options import options_from_table
from thinwire.config.registry import EXCHANGES
from thinwire.config.sections import ModelConfig, PipelineConfig, ReplicasConfig, RunConfig, TrainConfig
from thinwire.model.cut import StagePlan
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.replicas.exchange import make_exchange
from thinwire.replicas.peers import Peers
from thinwire.testing.laws import CPU, Options, demand, demand_refusal
from thinwire.testing.together import together

REPLICAS, STEPS = 3, 5
MODEL = ModelConfig(vocabulary=64, width=16, layers=1, heads=4, kv_heads=4, ffn=24, context=8)
TOLD = {"steps": 2, "warmup": 2}
"""Options that say when replicas talk, as they are tried besides the defaults."""
GRAPHS = ("complete", "0-1,1-2")


def option_names(name: str) -> set[str]:
    """Name the options of an exchange."""
    return {entry.name for entry in fields(EXCHANGES.load(name).Options)}


def variants_of_exchanges() -> list[tuple[str, Options]]:
    """List what the laws are tried with."""
    names = EXCHANGES.names()
    told = [(name, {option: value}) for name in names for option, value in TOLD.items() if option in option_names(name)]
    return [*((name, {}) for name in names), *told]


def config_of_variant(name: str, options: Options, count: int = REPLICAS, graph: str = "complete") -> RunConfig:
    """Describe a run of replicas of a model of one stage."""
    return RunConfig(
        seed=3,
        model=MODEL,
        train=TrainConfig(steps=STEPS, batch=count, warmup=0),
        pipeline=PipelineConfig(stages=1, microbatches=1),
        codec=codec_defaults("dense"),
        replicas=ReplicasConfig(count=count, graph=graph),
        exchange=options_from_table("exchange", {"name": name, **options}, "the law"),
    )


class Replica:
    """One copy of a stage that takes the steps of a trainer, with made gradients."""

    def __init__(self, config: RunConfig, peers: Peers, device: torch.device = CPU) -> None:
        self.stage = Stage(MODEL, StagePlan(0, 1, range(1)), make_codec(config.codec, MODEL), 0, 0).to(device)
        self.optimizer, self.peers, self.device = StageOptimizer(self.stage, config.train), peers, device
        self.named = {name: parameter.data for name, parameter in self.optimizer.named.items()}
        self.exchange = make_exchange(config, peers, self.optimizer.named)
        self.said = hashlib.sha256()
        self.moments: list[tuple[bool, bool]] = []
        swap = peers.swap

        def heard(outgoing: dict[int, bytes]) -> dict[int, bytes]:
            for peer, data in sorted(outgoing.items()):
                self.said.update(f"{peer} {len(data)} ".encode() + data)
            return swap(outgoing)

        peers.swap = heard  # type: ignore[method-assign,assignment]

    def gradients(self, step: int) -> dict[str, Tensor]:
        """Return what this replica would learn: half of it is what all learn, half its own."""
        found = {}
        for name, tensor in self.named.items():
            made = [torch.Generator().manual_seed(1000 * step + number) for number in (0, 1 + self.peers.index)]
            one, other = (torch.randn(tensor.shape, generator=generator) for generator in made)
            found[name] = ((one + other) / 2).to(self.device)
        return found

    def step(self, step: int) -> None:
        """Do what a trainer does in a step."""
        for name, gradient in self.gradients(step).items():
            self.optimizer.named[name].grad = gradient
        sent = self.peers.sent
        learnt = {name: parameter.grad for name, parameter in self.optimizer.named.items() if parameter.grad is not None}
        self.exchange.gradients(learnt, step)
        between = self.peers.sent
        self.optimizer.step(1.0, 1.0)
        self.exchange.commit()
        self.exchange.parameters(self.named, self.optimizer, step)
        self.exchange.commit()
        self.moments.append((between > sent, self.peers.sent > between))

    def run(self, steps: range) -> Replica:
        """Do some steps."""
        for step in steps:
            self.step(step)
        return self

    def resumed(self, config: RunConfig) -> Replica:
        """Return a replica that goes on from a checkpoint of this one."""
        other = Replica(config, self.peers, self.device)
        for name, tensor in other.named.items():
            tensor.copy_(self.named[name])
        other.optimizer.load_state_tensors({name: tensor.cpu().clone() for name, tensor in self.optimizer.state_tensors().items()})
        other.exchange.load_state(safetensors_torch.load(self.saved_state()))
        return other

    def saved_state(self) -> bytes:
        """Return the state of the exchange as a checkpoint holds it."""
        return safetensors_torch.save({name: tensor.cpu() for name, tensor in self.exchange.state.items()})


def trained(config: RunConfig, device: torch.device = CPU) -> list[Replica]:
    """Train all replicas to the end."""
    return together(REPLICAS, lambda peers: Replica(config, peers, device).run(range(STEPS)), config.replicas.graph)


def demand_equal(one: Replica, other: Replica, text: str) -> None:
    """Raise BrokenLaw unless two replicas have the same parameters."""
    for parameter, tensor in one.named.items():
        demand(torch.equal(tensor, other.named[parameter]), f"{text}: {parameter} differs")


def all_end_with_one_model(name: str, options: Options, device: torch.device = CPU, graph: str = "complete") -> None:
    """All replicas end with one model, which is not the one they began with."""
    first, *others = trained(config_of_variant(name, options, graph=graph), device)
    for other in others:
        demand_equal(first, other, f"graph {graph}, replica {other.peers.index}")
    start = Replica(config_of_variant(name, options, count=1), together(1, lambda peers: peers)[0], device).named
    demand(any(not torch.equal(tensor, start[parameter]) for parameter, tensor in first.named.items()), "nothing was learnt")


def talks_when_it_says_so(name: str, options: Options, device: torch.device = CPU) -> None:
    """Bytes are sent when it says that it talks, and only then."""
    for replica in trained(config_of_variant(name, options), device):
        told = [(replica.exchange.talks_before(step), replica.exchange.talks_after(step)) for step in range(STEPS)]
        demand(replica.moments == told, f"it talked {replica.moments}, and said {told}")
        meets = [replica.exchange.meets(step) == any(told[step]) for step in range(STEPS)]
        demand(all(meets), "it meets in other steps than it talks in")


def same_seed_says_the_same(name: str, options: Options, device: torch.device = CPU) -> None:
    """The same seed says the same bytes, and another gradient others."""
    config = config_of_variant(name, options)
    once, again = ([replica.said.hexdigest() for replica in trained(config, device)] for _ in range(2))
    demand(once == again, "other bytes with the same seed")
    demand(len(set(once)) == REPLICAS, "replicas with other gradients say the same")


def state_survives_a_restart(name: str, options: Options, device: torch.device = CPU, stop: int = 1) -> None:
    """A replica that goes on from a checkpoint ends with the same bits."""
    config = config_of_variant(name, options)

    def stopped(peers: Peers) -> Replica:
        return Replica(config, peers, device).run(range(stop)).resumed(config).run(range(stop, STEPS))

    for one, other in zip(trained(config, device), together(REPLICAS, stopped), strict=True):
        demand_equal(one, other, f"stopped after step {stop}")
        demand(one.saved_state() == other.saved_state(), f"stopped after step {stop}: the state differs")  # bits: nan is a value too


def abandoned_step_leaves_no_trace(name: str, options: Options, device: torch.device = CPU) -> None:
    """A step that is not committed leaves no trace."""
    config = config_of_variant(name, options)

    def abandoned(peers: Peers) -> Replica:
        replica = Replica(config, peers, device).run(range(2))
        replica.exchange.gradients(replica.gradients(7), 2)  # a step that a lost worker ends: all go back to what was committed
        return replica.resumed(config).run(range(2, STEPS))

    for one, other in zip(trained(config, device), together(REPLICAS, abandoned), strict=True):
        demand_equal(one, other, "after a step that was given up")


def state_with_a_gap_is_refused(name: str, options: Options, device: torch.device = CPU) -> None:
    """A state with a gap is refused by name."""
    config = config_of_variant(name, options)

    def task(peers: Peers) -> None:
        state = dict(Replica(config, peers, device).run(range(1)).exchange.state)
        for label in state:
            rest = {other: tensor for other, tensor in state.items() if other != label}
            exchange = Replica(config, peers, device).exchange
            demand_refusal(lambda: exchange.load_state(rest), "the checkpoint", f"a state without {label}")  # noqa: B023

    together(REPLICAS, task)


def alone_says_nothing(name: str, options: Options, device: torch.device = CPU) -> None:
    """Alone there is nothing to say, to keep or to change."""
    config = config_of_variant(name, options, count=1)
    (replica,) = together(1, lambda peers: Replica(config, peers, device).run(range(STEPS)))
    demand(replica.peers.sent == 0 and not replica.exchange.state and replica.exchange.meets(0), "one replica talks, or keeps something")
    given = replica.gradients(STEPS)
    replica.exchange.gradients(given, STEPS)
    unchanged = [torch.equal(tensor, replica.gradients(STEPS)[parameter]) for parameter, tensor in given.items()]
    demand(all(unchanged), "the gradients of one replica are changed")


LAWS: dict[str, Callable[..., None]] = {
    "one model": all_end_with_one_model,
    "talks when it says so": talks_when_it_says_so,
    "same bytes": same_seed_says_the_same,
    "restart": state_survives_a_restart,
    "abandoned step": abandoned_step_leaves_no_trace,
    "gap": state_with_a_gap_is_refused,
    "alone": alone_says_nothing,
}
