"""hybrid: gradients between replicas in few bits, boundaries between stages in more (systems, section 7).

A policy names a packing for the gradients, which is this file's part, and a codec for the boundaries, which is the run's: `check` refuses
a run whose codec is not that of its policy.

| preset | gradients | boundaries |
|---|---|---|
| `int8` | 8 bits and a scale per row | any codec |
| `mzhybrid` | ZFP, `rate` bits per value | `lossless` without `bits`, in place of MPC |
| `zhybrid` | ZFP, `rate` bits per value | `high_rate` bits per value |
| `naive` | ZFP, `rate` bits per value | as many |

No boundary codec is ZFP. A boundary of 32 or 16 bits per value is `dense` in fp32 or bf16; one of 8, 4 or 3 is `quantize`, which adds a
bf16 scale per token. On Gaussian values the relative RMS of 16, 8 and 4 bits is then 1.7e-3, 7.4e-3 and 0.13, that of ZFP 2.1e-4, 5.4e-2
and 0.97: so `zhybrid` is a little rougher here than where it was published, and `naive` much milder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.bits.packing import Int8, Packing, Zfp
from thinwire.config.sections import RunConfig
from thinwire.optim.optimizers import squared_norm
from thinwire.replicas.allreduce import mean, refuse_gaps
from thinwire.replicas.exchange import Exchange, ExchangeOptions, Named
from thinwire.replicas.peers import Peers

PRESETS = ("int8", "mzhybrid", "zhybrid", "naive")
LOSSLESS: dict[str, Any] = {"name": "lossless", "bits": None}
BOUNDARIES: dict[int, dict[str, Any]] = {
    32: {"name": "dense", "bits": None, "dtype": "fp32"},
    16: {"name": "dense", "bits": None, "dtype": "bf16"},
    **{bits: {"name": "quantize", "bits": bits, "backward_bits": (None, bits)} for bits in (8, 4, 3)},
}
"""Settings of a codec that sends so many bits per value; a tuple lists those that do."""
USUAL_RATE, USUAL_HIGH_RATE = 8, 16
LEAST_RATE_WITH_FEEDBACK = 6


@dataclass(frozen=True, kw_only=True)
class HybridOptions(ExchangeOptions):
    """A policy and its rates."""

    preset: str = "int8"
    """`int8`, `mzhybrid`, `zhybrid` or `naive`."""
    rate: int = USUAL_RATE
    """Bits per value of gradients in ZFP, 3 to 32."""
    high_rate: int = USUAL_HIGH_RATE
    """Bits per value of boundaries under `zhybrid`."""
    feedback: bool = False
    """Add what a packing has lost to the next gradient."""

    def check(self, config: RunConfig) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"exchange.preset is {self.preset!r}; choose one of {', '.join(PRESETS)}")
        if self.preset == "int8" and self.rate != USUAL_RATE:
            raise ValueError(f"exchange.rate is {self.rate}, but preset int8 always takes 8 bits; leave rate out, or choose zhybrid")
        if self.preset != "zhybrid" and self.high_rate != USUAL_HIGH_RATE:
            raise ValueError(f"exchange.high_rate is {self.high_rate}, but only preset zhybrid has one; leave it out")
        if self.feedback and self.rate < LEAST_RATE_WITH_FEEDBACK:
            raise ValueError(
                f"exchange.rate is {self.rate} with feedback, but a packing that loses about as much as it keeps makes what is fed "
                f"back grow without end; choose {LEAST_RATE_WITH_FEEDBACK} or more, or feedback=false"
            )
        self.packing()
        if config.pipeline.stages > 1:
            self.check_boundaries(config)

    def packing(self) -> Packing:
        """Return what gradients are sent in."""
        return Int8() if self.preset == "int8" else Zfp(self.rate)

    def check_boundaries(self, config: RunConfig) -> None:
        """Refuse a codec that is not that of the preset."""
        if self.preset == "int8":
            return
        rate = {"mzhybrid": None, "zhybrid": self.high_rate, "naive": self.rate}[self.preset]
        if rate is not None and rate not in BOUNDARIES:
            option = "high_rate" if self.preset == "zhybrid" else "rate"
            raise ValueError(
                f"exchange.{option} is {rate}, but no codec sends boundaries in {rate} bits per value, as preset {self.preset} asks; "
                f"choose one of {', '.join(map(str, sorted(BOUNDARIES)))}"
            )
        for option, wanted in (LOSSLESS if rate is None else BOUNDARIES[rate]).items():
            found = getattr(config.codec, option, None)
            allowed = wanted if isinstance(wanted, tuple) else (wanted,)
            if found not in allowed:
                remedy = f"leave --codec.{option} out" if allowed[0] is None else f"add --codec.{option} {allowed[0]}"
                raise ValueError(
                    f"preset {self.preset} of hybrid sends boundaries {'lossless' if rate is None else f'in {rate} bits per value'}, but "
                    f"codec.{option} is {found}; {remedy}, or choose preset int8, which goes with any codec"
                )


class Hybrid(Exchange):
    """Average the gradients in few bits."""

    Options = HybridOptions
    options: HybridOptions

    def __init__(self, options: HybridOptions, config: RunConfig, peers: Peers, parameters: Named) -> None:
        super().__init__(options, config, peers, parameters)
        self.packing = options.packing()

    def gradients(self, named: Named, step: int) -> None:
        average = self._with_feedback if self.options.feedback else self._plain
        for gradient, found in zip(named.values(), average(named), strict=True):
            gradient.copy_(found)

    def _plain(self, named: Named) -> list[Tensor]:
        return mean(self.peers, list(named.values()), self.packing)

    @torch.no_grad()
    def _with_feedback(self, named: Named) -> list[Tensor]:
        given = [gradient + self.state.get(f"residual/{name}", 0) for name, gradient in named.items()]
        lost = [torch.zeros_like(gradient, memory_format=torch.contiguous_format) for gradient in given]
        averages = mean(self.peers, given, self.packing, lost)
        for name, loss in zip(named, lost, strict=True):
            self.propose(f"residual/{name}", loss)
        self.figures = {"residual": relative_norm(lost, given)}
        return averages

    def talks_before(self, step: int) -> bool:
        return True

    def load_state(self, state: Named) -> None:
        needed = {f"residual/{name}": parameter.shape for name, parameter in self.parameters_of_stage.items() if self.options.feedback}
        refuse_gaps("hybrid with feedback", state, needed)
        super().load_state({name: state[name] for name in needed})


def relative_norm(parts: list[Tensor], wholes: list[Tensor]) -> float:
    """Return the norm of all parts as a share of the norm of all wholes."""
    norms = [squared_norm(tensors) ** 0.5 for tensors in (parts, wholes)]
    return norms[0] / norms[1] if norms[1] else 0.0
