"""gravac: choose the compression factor while training (GraVAC, Tyagi and Swany, arXiv 2305.12201; systems, section 4).

    gain(c) = E |C_c(G)|^2 / E |G|^2   with G = gradient + residual, E over all replicas and smoothed over steps
    send the candidate factor's values if its gain suffices, else the minimum's, else everything

At the end of every window the minimum moves up to a candidate that loses hardly more, and the candidate to the next factor of the policy,
or to the lower of the two best once throughput no longer grows. All replicas see the same norms, so all take the same branch; each stage
decides for itself. The paper divides by measured time, which no replay would repeat: here a step's cost is reckoned from the factor.

Gradients may be as light-tailed as a Gaussian. Its gain, residual included, is 0.93 at a factor of 2, 0.72 at 4, 0.49 at 8 and 0.30 at 16,
so the published minimum of 10 and gain of 0.7 would send everything for ever. The search never steps back: past the last factor that has
enough gain, the minimum is what is sent. So the defaults end where a Gaussian still has enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.bits.mask import kept_count
from thinwire.bits.sparse import is_large
from thinwire.config.sections import RunConfig
from thinwire.model.noise import key, uniform
from thinwire.replicas.allreduce import mean, refuse_gaps
from thinwire.replicas.exchange import Exchange, ExchangeOptions, Named
from thinwire.replicas.peers import Peers
from thinwire.replicas.sparse_mean import gather_share, sparse_mean, two_shots_share
from thinwire.util.device import has_fp64

POLICIES = ("exponential", "geometric")
LARGEST_FACTOR = 1e6
DENSE, FIRST = 0, 1
"""Places among the factors: everything is sent, and the minimum to begin with."""
WHOLE, REAL = ("minimum", "candidate", "explored", "iterations"), ("gain_minimum", "gain_candidate")
"""What a controller remembers, beside throughputs."""
PURPOSE = int.from_bytes(b"gravac")  # what a key is for, out of reach of the purposes that `noise` counts

Compressor = Callable[[Tensor, int, tuple[int, ...]], Tensor]
"""Return the positions of a number of values of a vector; the integers tell draws apart."""


def top(values: Tensor, kept: int, draw: tuple[int, ...]) -> Tensor:
    """Return where the values of largest size are; chosen among the largest, the same ones are found."""
    return values.abs().topk(kept).indices


def anywhere(values: Tensor, kept: int, draw: tuple[int, ...]) -> Tensor:
    """Return positions drawn at random."""
    return uniform(torch.tensor([key(PURPOSE, *draw)], device=values.device), (1, len(values))).view(-1).topk(kept).indices


COMPRESSORS: Mapping[str, Compressor] = {"topk": top, "randomk": anywhere}


@dataclass(frozen=True, kw_only=True)
class GraVACOptions(ExchangeOptions):
    """Options of the adaptive exchange."""

    minimum: float = 2.0
    """Least compression factor to begin with: values in all, by values sent."""
    maximum: float = 8.0
    """Largest compression factor that is tried."""
    gain: float = 0.4
    """Least share of the squared norm that has to be sent; below it a smaller factor is used."""
    omega: float = 0.01
    """Gains, or throughputs, that differ by no more than this share count as equal."""
    window: int = 50
    """Steps between two moves."""
    policy: str = "geometric"
    """Factors tried: the minimum times 2, 4, 16, 256 (`exponential`) or times 2, 4, 8, 16 (`geometric`), and so on up to the maximum."""
    compressor: str = "topk"
    """How values are chosen: the largest (`topk`), or at random (`randomk`), whose gain is only 1 / factor."""
    smoothing: float = 0.0
    """Weight of a step's gain in its running mean; 0: a hundredth per replica."""
    saturation: bool = True
    """Stop at the lower of the two best factors once their throughputs are equal."""
    compute: float = 0.05
    """Time of a step without exchange, as a share of the time that sending the gradients once as they are would take."""

    def check(self, config: RunConfig) -> None:
        """Refuse values that cannot work."""
        rules = [
            ("minimum", 1 < self.minimum <= LARGEST_FACTOR, f"above 1 and up to {LARGEST_FACTOR:g}, such as 2.0"),
            ("maximum", self.minimum <= self.maximum <= LARGEST_FACTOR, f"from the minimum {self.minimum} to {LARGEST_FACTOR:g}"),
            ("gain", 0 < self.gain <= 1, "above 0 and up to 1, such as 0.4"),
            ("omega", 0 <= self.omega < 1, "from 0 to below 1, such as 0.01"),
            ("window", self.window >= 1, "of 1 step or more, such as 50"),
            ("smoothing", 0 <= self.smoothing <= 1, "from 0 to 1; 0 stands for a hundredth per replica"),
            ("compute", 0 < self.compute < math.inf, "above 0, such as 0.05"),
        ]
        for option, sound, wanted in rules:
            if not sound:
                raise ValueError(f"exchange.{option} is {getattr(self, option)}; choose a value {wanted}")
        for option, names in (("policy", POLICIES), ("compressor", tuple(COMPRESSORS))):
            if getattr(self, option) not in names:
                raise ValueError(f"exchange.{option} is {getattr(self, option)!r}; choose one of {', '.join(names)}")


def ladder(minimum: float, maximum: float, policy: str) -> tuple[float, ...]:
    """Return all factors that may be sent: 1, then what the policy tries one after the other."""
    factors, exponent = [1.0, minimum], 1
    while factors[-1] < maximum:
        factors.append(min(minimum * 2.0**exponent, maximum))
        exponent = exponent * 2 if policy == "exponential" else exponent + 1
    return tuple(factors)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a controller goes by: the factors, and options of the same names."""

    factors: tuple[float, ...]
    gain: float
    omega: float
    window: int
    smoothing: float = 1.0
    saturation: bool = True


class Controller:
    """Decide what factor is sent; free of tensors and of replicas."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        last = len(rules.factors) - 1
        # Places among the factors; the candidate is the farthest one explored unless throughput has called it back.
        self.minimum, self.candidate, self.explored = FIRST, min(FIRST + 1, last), min(FIRST + 1, last)
        self.gain_minimum = self.gain_candidate = math.nan
        self.iterations = 0
        self.throughputs = [math.nan] * (last + 1)
        self.sent, self.gain = DENSE, 1.0

    def choose(self, gain_minimum: float, gain_candidate: float) -> float:
        """Return the factor to send, given the gains of this iteration."""
        self.sent, self.gain = DENSE, 1.0
        if math.isfinite(gain_minimum) and math.isfinite(gain_candidate):  # otherwise everyone must see what is wrong
            self.gain_minimum = self._smooth(self.gain_minimum, gain_minimum)
            self.gain_candidate = self._smooth(self.gain_candidate, gain_candidate)
            if self.gain_candidate >= self.rules.gain:
                self.sent, self.gain = self.candidate, self.gain_candidate
            elif self.gain_minimum >= self.rules.gain:
                self.sent, self.gain = self.minimum, self.gain_minimum
        return self.rules.factors[self.sent]

    def _smooth(self, old: float, new: float) -> float:
        """Go on with a running mean, or begin one: that of another factor says nothing about this one."""
        return new if math.isnan(old) else old + self.rules.smoothing * (new - old)

    def finish(self, cost: float) -> None:
        """End the iteration, which has cost that much time."""
        self.throughputs[self.sent] = self.gain / cost
        self.iterations += 1
        if self.iterations % self.rules.window == 0:
            self._move()

    def _move(self) -> None:
        """Move the minimum to the candidate if that loses hardly more, then the candidate."""
        if abs(self.gain_minimum - self.gain_candidate) <= self.rules.omega * self.gain_minimum:
            self.minimum, self.gain_minimum = self.candidate, self.gain_candidate
        ideal = saturated(self.throughputs, self.rules.omega) if self.rules.saturation else None
        if ideal is None:
            self.explored = min(self.explored + 1, len(self.rules.factors) - 1)
        following = self.explored if ideal is None else max(ideal, self.minimum)
        if following != self.candidate:
            self.candidate, self.gain_candidate = following, math.nan

    def save(self) -> dict[str, float]:
        """Return all that decides later choices, by name."""
        places = {f"throughput_{factor!r}": value for factor, value in zip(self.rules.factors, self.throughputs, strict=True)}
        return {name: float(getattr(self, name)) for name in (*WHOLE, *REAL)} | places

    def load(self, saved: Mapping[str, float]) -> None:
        """Go on from what was saved."""
        for name in WHOLE:
            setattr(self, name, int(saved[name]))
        for name in REAL:
            setattr(self, name, saved[name])
        self.throughputs = [saved[f"throughput_{factor!r}"] for factor in self.rules.factors]


def saturated(throughputs: Sequence[float], omega: float) -> int | None:
    """Return the lower place of the two best throughputs if they are equal; NaN: not measured."""
    measured = sorted((-value, place) for place, value in enumerate(throughputs) if not math.isnan(value))
    if len(measured) < 2:
        return None
    (best, first), (other, second) = measured[:2]
    return min(first, second) if other - best <= -omega * best else None


class GraVAC(Exchange):
    """Average as few of the gradients' values as their gain allows, and later the rest."""

    Options = GraVACOptions
    options: GraVACOptions

    def __init__(self, options: GraVACOptions, config: RunConfig, peers: Peers, parameters: Named) -> None:
        super().__init__(options, config, peers, parameters)
        self.compress = COMPRESSORS[options.compressor]
        self.numbers = {name: number for number, name in enumerate(parameters)}
        self.rules = Rules(
            factors=ladder(options.minimum, options.maximum, options.policy),
            gain=options.gain,
            omega=options.omega,
            window=options.window,
            smoothing=options.smoothing or min(1.0, peers.count / 100),
            saturation=options.saturation,
        )
        self.state = self._beginning()

    def _beginning(self) -> dict[str, Tensor]:
        """Return the state of a run that begins."""
        state = {name: torch.tensor(value, dtype=torch.float64) for name, value in Controller(self.rules).save().items()}
        for name, parameter in self.parameters_of_stage.items():
            if is_large(parameter):
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                state[f"residual/{name}"] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        return state

    @torch.no_grad()
    def gradients(self, named: Named, step: int) -> None:
        controller = Controller(self.rules)
        controller.load({name: float(tensor) for name, tensor in self.state.items() if "/" not in name})
        plain = {name: gradient for name, gradient in named.items() if not is_large(gradient)}
        large = {name: gradient for name, gradient in named.items() if is_large(gradient)}
        totals = {name: (gradient + self.state[f"residual/{name}"]).contiguous() for name, gradient in large.items()}
        places = (controller.minimum, controller.candidate)
        chosen = {name: self._positions(name, total.view(-1), step, places) for name, total in totals.items()}
        norms, *averages = mean(self.peers, [_squared_norms(totals, chosen), *plain.values()])
        whole, least, candidate = norms.tolist()
        factor = controller.choose(*((part / whole if whole else 1.0) for part in (least, candidate)))
        if controller.sent == DENSE:
            averages += self._send_all(totals)
        else:
            averages += self._send(totals, {name: pair[places.index(controller.sent)] for name, pair in chosen.items()}, factor)
        for name, average in zip((*plain, *totals), averages, strict=True):
            named[name].copy_(average)
        self.figures = {"factor": factor, "gain": controller.gain, "candidate": self.rules.factors[controller.candidate]}
        controller.finish(self.cost(factor, max((total.dtype.itemsize for total in totals.values()), default=4)))
        for name, value in controller.save().items():
            self.propose(name, torch.tensor(value, dtype=torch.float64))

    def _positions(self, name: str, total: Tensor, step: int, places: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return where the values are that two factors send, the second chosen among those of the first."""
        first, second = (kept_count(1 / self.rules.factors[place], len(total)) for place in places)
        draw = (self.config.seed, self.peers.index, step, self.numbers[name])
        least = self.compress(total, first, (*draw, 0))
        return least, least if first == second else least[self.compress(total[least], second, (*draw, 1))]

    def _send_all(self, totals: Named) -> list[Tensor]:
        """Average gradients and residuals whole; nothing is left over."""
        for name, total in totals.items():
            self.propose(f"residual/{name}", torch.zeros_like(total))
        return mean(self.peers, list(totals.values()))

    def _send(self, totals: Named, positions: Named, factor: float) -> list[Tensor]:
        """Average the values at some positions and keep the rest."""
        sent = []
        for name, total in totals.items():
            residual = total.clone()
            residual.view(-1).index_fill_(0, positions[name], 0)
            self.propose(f"residual/{name}", residual)
            # Not the difference of the two, which would turn infinity into NaN.
            picked = torch.zeros_like(total)
            picked.view(-1)[positions[name]] = total.view(-1)[positions[name]]
            sent.append(picked)
        return sparse_mean(self.peers, sent, 1 / factor)

    def cost(self, factor: float, size: int) -> float:
        """Reckon the time of a step, in times of sending the gradients once as they are, as numbers of `size` bytes."""
        count = self.peers.count
        if factor == 1:
            return self.options.compute + 2 * (count - 1) / count
        return self.options.compute + min(share(1 / factor, count, 8 * size) for share in (gather_share, two_shots_share))

    def talks_before(self, step: int) -> bool:
        return True

    def load_state(self, state: Named) -> None:
        beginning = self._beginning()
        refuse_gaps("gravac", state, {name: tensor.shape for name, tensor in beginning.items()})
        if unknown := [name for name in state if "/" not in name and name not in beginning]:
            raise ValueError(
                f"the checkpoint holds {unknown[0]}, a factor that gravac would not try with its options; "
                "resume with the options of its exchange that it was made with"
            )
        super().load_state({name: state[name] for name in beginning if "/" in name})
        self.state |= {name: state[name].clone() for name in beginning if "/" not in name}  # the controller's numbers stay on the host


def _squared_norms(totals: Named, chosen: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Return the squared norms of everything, and of the values at each of two lists of positions."""
    norms: list[Tensor] = []
    for name, total in totals.items():
        flat, dtype = total.view(-1), torch.float64 if has_fp64(total.device) else total.dtype
        vectors = (flat, *(flat[positions] for positions in chosen[name]))
        norms += [torch.linalg.vector_norm(vector, dtype=dtype) for vector in vectors]
    found = torch.stack(norms).cpu().double().square().view(-1, 3) if norms else torch.zeros(0, 3, dtype=torch.float64)
    return torch.cat((torch.zeros(1, 3, dtype=torch.float64), found)).sum(0)
