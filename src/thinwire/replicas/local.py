"""local: every replica trains alone for some steps, then all take one step of Nesterov's momentum along their mean change (DiLoCo).

At a meeting, with anchor A the parameters of the last one: c = mean over replicas of A - X, V <- momentum V + c,
A <- A - rate (c + momentum V), X <- A. The mean is the same to the bit everywhere, so A and V are, and a lossy packing moves the replicas
together. What a packing loses of a change is not carried on to the next meeting: see `LocalOptions.packing`. Moments of the inner optimizer
stay with their replica. A run may begin with averaged gradients (`LocalOptions.warmup`; Lin et al. 2018, arXiv 1808.07217).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.bits.packing import make_packing
from thinwire.config.sections import RunConfig
from thinwire.optim.optimizers import StageOptimizer
from thinwire.replicas.allreduce import average, mean, refuse_gaps
from thinwire.replicas.exchange import Exchange, ExchangeOptions, Named, flat, refuse_warmup

ANCHOR, MOMENTUM = "anchor", "momentum"


@dataclass(frozen=True, kw_only=True)
class LocalOptions(ExchangeOptions):
    """How often replicas meet, and the step that they take then."""

    steps: int = 20
    """Steps from one meeting to the next."""
    warmup: int = 0
    """First steps in which gradients are averaged instead: replicas that begin alone go apart fastest there."""
    rate: float = 1.0
    """Share of the mean change that is taken."""
    momentum: float = 0.0
    """What the next meeting keeps of this one's change. DiLoCo's rate of 0.7 and momentum of 0.9 are for rounds of hundreds of steps; with
    20 they diverged, and 0.7 with 0.5 ended higher than the plain mean (docs/log.md)."""
    packing: str = "int8"
    """What changes are sent in. What int8 loses is not worth keeping: on a toy of 4 replicas that met every 20 of 240 steps, the validation
    loss was 2.4055 and 2.4387 (two seeds) against 2.4054 and 2.4388 with fp32, for 3.6 times less traffic."""

    def check(self, config: RunConfig) -> None:
        if self.steps < 1:
            raise ValueError(f"exchange.steps is {self.steps}; choose at least 1, such as 20")
        refuse_warmup(self.warmup)
        if not 0 < self.rate <= 2:
            raise ValueError(f"exchange.rate is {self.rate}; choose one above 0 and at most 2, such as 1.0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"exchange.momentum is {self.momentum}; choose one from 0 to below 1, such as 0.5")
        make_packing(self.packing)


class Local(Exchange):
    """Let replicas train alone and meet every few steps."""

    Options = LocalOptions

    def talks_before(self, step: int) -> bool:
        return step < self.options.warmup

    def talks_after(self, step: int) -> bool:
        last = step == self.config.train.steps - 1
        return not self.talks_before(step) and ((step + 1) % self.options.steps == 0 or last)

    @torch.no_grad()
    def gradients(self, named: Named, step: int) -> None:
        """Average them during warm-up; note where replicas part, before the first update that each does alone."""
        if self.talks_before(step):
            average(self.peers, named.values())
        if not self.state or step == self.options.warmup:
            for name, tensor in self.parameters_of_stage.items():
                self.propose(f"{ANCHOR}/{name}", tensor.detach().clone())
                self.propose(f"{MOMENTUM}/{name}", torch.zeros_like(tensor.detach()))

    @torch.no_grad()
    def parameters(self, named: Named, optimizer: StageOptimizer, step: int) -> None:
        if not self.talks_after(step):
            return
        own = {name: self.state[f"{ANCHOR}/{name}"] - tensor for name, tensor in named.items()}
        changes = dict(zip(own, mean(self.peers, list(own.values()), make_packing(self.options.packing)), strict=True))
        for name, tensor in named.items():
            velocity = self.options.momentum * self.state[f"{MOMENTUM}/{name}"] + changes[name]
            anchor = self.state[f"{ANCHOR}/{name}"] - self.options.rate * (changes[name] + self.options.momentum * velocity)
            tensor.copy_(anchor)
            self.propose(f"{ANCHOR}/{name}", anchor)
            self.propose(f"{MOMENTUM}/{name}", velocity)
        length = float(flat(own).norm())
        self.figures["change"] = length
        self.figures["agreement"] = float(flat(changes).norm()) / length if length else 1.0

    def load_state(self, state: Named) -> None:
        needed = {f"{label}/{name}": tensor.shape for label in (ANCHOR, MOMENTUM) for name, tensor in self.parameters_of_stage.items()}
        refuse_gaps("local", state, needed)
        super().load_state({name: state[name] for name in needed})
