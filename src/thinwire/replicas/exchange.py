"""The seam between copies of a stage: what an exchange method is, and how one is made.

`gradients` comes before the update and `parameters` after it; both change what they are given in place. One file per method. State is
transactional: a method reads `self.state` and proposes new tensors, which count once the step is committed, so an abandoned step leaves
no trace and a checkpoint never holds half of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.config.registry import EXCHANGES
from thinwire.config.sections import RunConfig
from thinwire.model.subspace.drift import carry_over
from thinwire.optim.optimizers import StageOptimizer
from thinwire.replicas.peers import Peers

Named = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options every exchange has."""

    name: str
    """Name in the registry."""

    def check(self, config: RunConfig) -> None:
        """Refuse values that cannot work in this run."""


class Exchange:
    """Make copies of a stage learn from each other; this one lets every replica learn alone."""

    Options: ClassVar[type[ExchangeOptions]] = ExchangeOptions

    def __init__(self, options: Any, config: RunConfig, peers: Peers, parameters: Named) -> None:
        """Get ready to exchange these parameters of a stage, or their gradients."""
        self.options, self.config, self.peers, self.parameters_of_stage = options, config, peers, parameters
        self.state: dict[str, Tensor] = {}
        """What has been committed, as LABEL/PARAMETER or LABEL; only `propose` and `load_state` change it."""
        self._proposed: dict[str, Tensor] = {}
        self.figures: dict[str, float] = {}
        """What a step is worth telling, such as the density of what was sent."""

    def gradients(self, named: Named, step: int) -> None:
        """Exchange gradients before the update, in place."""

    def parameters(self, named: Named, optimizer: StageOptimizer, step: int) -> None:
        """Exchange parameters, or what the optimizer keeps of them, after the update, in place."""

    def talks_before(self, step: int) -> bool:
        """Tell whether `gradients` needs the other replicas at a step."""
        return False

    def talks_after(self, step: int) -> bool:
        """Tell whether `parameters` needs the other replicas at a step."""
        return False

    def meets(self, step: int) -> bool:
        """Tell whether the replicas wait for each other at a step."""
        return self.peers.count == 1 or self.talks_before(step) or self.talks_after(step)

    def propose(self, name: str, tensor: Tensor) -> None:
        """Set a tensor of the state once the step is committed."""
        self._proposed[name] = tensor

    def commit(self) -> None:
        """Make what was proposed the state."""
        self.state |= self._proposed
        self._proposed = {}

    def take_figures(self) -> dict[str, float]:
        """Return what there is to tell since the last call, as it is called in the metrics."""
        figures, self.figures = self.figures, {}
        return {f"exchange_{name}": value for name, value in figures.items()}

    def load_state(self, state: Named) -> None:
        """Put back the state of a checkpoint; memory is torch's own. A method that finds less than it needs refuses by name."""
        device = next((tensor.device for tensor in self.parameters_of_stage.values()), torch.device("cpu"))
        self.state, self._proposed = {name: tensor.to(device, copy=True) for name, tensor in state.items()}, {}

    def carry_over(self, rotation_KK: Tensor, axes: Mapping[str, int]) -> None:
        """Carry state that has the shape of a parameter in coordinates over to a moved basis."""
        for name, tensor in self.state.items():
            parameter = name.partition("/")[2]
            if parameter in axes and tensor.shape == self.parameters_of_stage[parameter].shape:
                carry_over(tensor, rotation_KK, axes[parameter])


def make_exchange(config: RunConfig, peers: Peers, parameters: Named) -> Exchange:
    """Make the exchange that a config describes; a single replica needs none."""
    if config.replicas.count == 1:
        return Exchange(config.exchange, config, peers, parameters)
    config.exchange.check(config)
    return EXCHANGES.load(config.exchange.name)(config.exchange, config, peers, parameters)


def refuse_warmup(warmup: int) -> None:
    """Refuse a number of first steps that is none."""
    if warmup < 0:
        raise ValueError(f"exchange.warmup is {warmup}; choose a number of steps from 0, such as 40")


def flat(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Lay tensors out one after the other, in the order of their names' mapping; fp64 stays fp64."""
    return torch.cat([tensor.detach().flatten().to(torch.promote_types(tensor.dtype, dtype)) for tensor in tensors.values()])
