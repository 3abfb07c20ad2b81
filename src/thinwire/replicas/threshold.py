"""threshold: send what exceeds a stale threshold: dynamic communication thresholding (Gupta et al., arXiv 2010.08899), data-parallel half.

    G = gradient + E,   M = |G| >= tau,   send G at M,   E <- G elsewhere        (systems, section 2)

Each replica keeps a residual E and a threshold tau per large parameter; the rest is averaged whole. Finding tau is the dear part, so it is
kept for many steps. A tau from before the residual has filled lets far too much through, so it is renewed often at the start, and early
once a step's density was off. The step that renews it sends exactly the largest values, ties resolved as `torch.topk` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.bits.mask import at_least, kept_count
from thinwire.bits.sparse import is_large
from thinwire.config.sections import RunConfig
from thinwire.replicas.allreduce import average, mean, refuse_gaps
from thinwire.replicas.exchange import Exchange, ExchangeOptions, Named, refuse_warmup
from thinwire.replicas.peers import Peers
from thinwire.replicas.sparse_mean import sparse_mean

RIPENING = 10
"""A threshold is kept for no more than a step per this many exchanges so far: while the residual still fills, an old one is wrong."""


@dataclass(frozen=True, kw_only=True)
class ThresholdExchangeOptions(ExchangeOptions):
    """Options of the thresholded exchange."""

    density: float = 0.01
    """Share of a gradient's values that the threshold aims to send."""
    lifespan: int = 100
    """Most steps that a threshold is kept for; 1: send exactly the largest values."""
    slack: float = 1.5
    """Renew a threshold early when a step's density was off by more than this factor; `inf`: never."""
    feedback: bool = True
    """Add what was not sent to the next step's gradient."""
    warmup: int = 0
    """First steps in which gradients travel whole."""

    def check(self, config: RunConfig) -> None:
        """Refuse values that cannot work."""
        refuse_warmup(self.warmup)
        if not 0 < self.density <= 1:
            raise ValueError(f"exchange.density is {self.density}; choose a share above 0 and up to 1, such as 0.01")
        if self.lifespan < 1:
            raise ValueError(f"exchange.lifespan is {self.lifespan}; choose 1 step or more, such as 100")
        if not self.slack > 1:
            raise ValueError(f"exchange.slack is {self.slack}; choose a factor above 1, such as 1.5")


@dataclass(frozen=True)
class HeldThreshold:
    """What is remembered of a parameter's threshold: its value, the exchange it is from (-1: none), and the values sent last."""

    tau: Tensor
    taken: int = -1
    kept: int = 0


def choose_sent(total: Tensor, held: HeldThreshold, steps: int, options: ThresholdExchangeOptions) -> tuple[Tensor, HeldThreshold]:
    """Return the mask of what is sent of a gradient and its residual in exchange `steps`, and the threshold held for the next one."""
    sizes = total.abs()
    if is_due(held, steps, total.numel(), options):
        largest = sizes.flatten().topk(kept_count(options.density, total.numel()))  # NaN counts as the largest, so it is sent
        mask = torch.zeros(total.numel(), dtype=torch.bool, device=total.device).index_fill_(0, largest.indices, True).view(total.shape)
        tau, taken = largest.values[-1].clone(), steps
    else:
        mask, tau, taken = at_least(sizes, held.tau), held.tau, held.taken
    return mask, HeldThreshold(tau, taken, int(mask.count_nonzero()))


def is_due(held: HeldThreshold, steps: int, count: int, options: ThresholdExchangeOptions) -> bool:
    """Tell whether a threshold is to be renewed: there is none, it is old, or the last step's density was off."""
    lifespan = min(options.lifespan, max(1, steps // RIPENING))
    if held.taken < 0 or steps - held.taken >= lifespan:
        return True
    ratio = held.kept / kept_count(options.density, count)
    return not 1 / options.slack <= ratio <= options.slack


class ThresholdExchange(Exchange):
    """Average the gradients' largest values, and later the rest."""

    Options = ThresholdExchangeOptions
    options: ThresholdExchangeOptions

    def __init__(self, options: ThresholdExchangeOptions, config: RunConfig, peers: Peers, parameters: Named) -> None:
        super().__init__(options, config, peers, parameters)
        self.state = self._beginning()

    def _beginning(self) -> dict[str, Tensor]:
        """Return the state of a run that begins: nothing left over, and no thresholds."""
        state = {"steps": torch.tensor(0)}
        for name, parameter in self.parameters_of_stage.items():
            if is_large(parameter):
                wide = torch.zeros(parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device)
                state |= {f"residual/{name}": wide} if self.options.feedback else {}
                state |= {f"tau/{name}": wide.new_zeros(()), f"taken/{name}": torch.tensor(-1), f"kept/{name}": torch.tensor(0)}
        return state

    @torch.no_grad()
    def gradients(self, named: Named, step: int) -> None:
        if step < self.options.warmup:
            average(self.peers, named.values())
            return
        plain = {name: gradient for name, gradient in named.items() if not is_large(gradient)}
        sent = {name: self._send(name, gradient) for name, gradient in named.items() if is_large(gradient)}
        averages = dict(zip(plain, mean(self.peers, list(plain.values())), strict=True)) if plain else {}
        if sent:
            averages |= zip(sent, sparse_mean(self.peers, list(sent.values()), self.options.density), strict=True)
            values = sum(tensor.numel() for tensor in sent.values())
            self.figures["density"] = sum(int(self._proposed[f"kept/{name}"]) for name in sent) / values
        self.propose("steps", self.state["steps"] + 1)
        for name, found in averages.items():
            named[name].copy_(found)

    def _send(self, name: str, gradient: Tensor) -> Tensor:
        """Return what is sent of a gradient and its residual, zeros elsewhere, and propose what is kept."""
        residual = self.state.get(f"residual/{name}")
        total = gradient.to(self.state[f"tau/{name}"].dtype) if residual is None else gradient + residual
        held = HeldThreshold(self.state[f"tau/{name}"], int(self.state[f"taken/{name}"]), int(self.state[f"kept/{name}"]))
        mask, held = choose_sent(total, held, int(self.state["steps"]), self.options)
        if residual is not None:
            self.propose(f"residual/{name}", total.masked_fill(mask, 0))
        self.propose(f"tau/{name}", held.tau)
        self.propose(f"taken/{name}", torch.tensor(held.taken))
        self.propose(f"kept/{name}", torch.tensor(held.kept))
        return total.masked_fill(~mask, 0)

    def talks_before(self, step: int) -> bool:
        return True

    def load_state(self, state: Named) -> None:
        beginning = self._beginning()
        refuse_gaps("threshold", state, {name: tensor.shape for name, tensor in beginning.items()})
        super().load_state({name: state[name] for name in beginning})
