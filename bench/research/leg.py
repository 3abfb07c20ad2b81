"""One direction of one boundary: uniform steps around a causal prediction, and the length of an ideal adaptive code for them.

Everything that predicts (means, scales, counts) is made from values decoded in earlier messages, or from channels of this message that
are decoded before, so a receiver can follow. The code length is -log2 of the adaptive probabilities plus HEADER_BITS per message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.model.noise import mix

LARGEST = 15
CLASSES, PER_OCTAVE, LOWEST = 44, 3, -10
HEADER_BITS = 64
BUCKETS = 16384


@dataclass(frozen=True, kw_only=True)
class LegOptions:
    """How one direction is coded."""

    bits: float | None = None
    """Target bits per token; None: not quantised, not counted."""
    rounding: float = 0.5
    """Share of a step that rounds up: 0.5 is nearest, less is a dead zone."""
    shrink: float = 0.0
    """Reconstruct this share of a step nearer to zero."""
    mean: str = "none"
    """Predict by running means of decoded values, each of what those before it leave, such as token+pair: token, target, pair, both."""
    mean_rate: float = 0.05
    prior: float = 1.0
    """Occurrences of a key that count against its mean."""
    dither: bool = False
    """Subtractive dither."""
    energy: str = "token"
    """Scale context by: none, token, target, both."""
    start: float = 1.0
    """First step size, in root mean squares of the first message."""
    control: float = 0.4
    penalty: float = 0.0
    """Nats per bit in the sender's loss."""
    floor: float = 0.0
    """Smallest step size; with it the penalty's weight is steered: up while the step has to be larger, down while bits are left."""
    sample: float = 0.0
    """Tokens with a norm below this many steps are sent with a probability in proportion to it, made that large: right on average."""
    rotate: float = 0
    """Messages between new rotations, sent as 16 bits per entry; 0: none."""
    late: float = 1.0
    """Rate from `late_from` on, in rates before it; the mean over the run is `bits`."""
    late_from: float = 0.75
    messages: float = 1200
    """Messages of the whole run."""


def laplace_counts() -> Tensor:
    """Return a prior for every class: a two-sided geometric distribution with that mean magnitude."""
    magnitude_C = 2.0 ** ((torch.arange(CLASSES) + LOWEST * PER_OCTAVE) / PER_OCTAVE)
    # mean of |q| for p(q) ~ t^|q| is 2t / (1 - t^2)
    t_C = (torch.sqrt(1 + magnitude_C**2) - 1) / magnitude_C
    q_S = torch.arange(-LARGEST, LARGEST + 1).abs()
    weights = t_C[:, None].clamp(1e-6) ** q_S
    return 4 * weights / weights.sum(1, keepdim=True) + 1e-4


class Leg:
    """Quantise messages and count their bits."""

    def __init__(self, options: LegOptions, rank: int, vocabulary: int, seed: int) -> None:
        self.options, self.rank = options, rank
        self.step: float | None = None
        self.rotation_KK = torch.eye(rank)
        self.covariance_KK: Tensor | None = None
        self.messages = 0
        self.exact = False
        self.penalty = options.penalty
        self.shadows: list[Leg] = []
        self.size_K = torch.full((rank,), 0.5)
        self.vocabulary = vocabulary
        self.means = [Means(name, rank, options.prior, options.mean_rate) for name in options.mean.split("+") if name != "none"]
        self.ratio = {name: torch.ones(vocabulary + 1) for name in ("token", "target")}
        self.prior_CS = laplace_counts()
        self.counts_CS = torch.zeros_like(self.prior_CS)
        self.generator = torch.Generator().manual_seed(seed)
        self.bits = self.tokens = 0.0
        self.last: dict[str, float] = {}

    def keys(self, ids_BT: Tensor) -> dict[str, Tensor]:
        """Return what both ends know of each place: its token, the next one, and pairs of tokens."""
        outside = torch.full_like(ids_BT[:, :1], self.vocabulary)
        target_BT, before_BT = torch.cat((ids_BT[:, 1:], outside), 1), torch.cat((outside, ids_BT[:, :-1]), 1)

        def hashed(first: Tensor, second: Tensor) -> Tensor:
            return mix((mix(first + 12345) + second * 0x9E3779) & 0xFFFFFFFF) % BUCKETS

        return {"token": ids_BT, "target": target_BT, "pair": hashed(before_BT, ids_BT), "both": hashed(ids_BT, target_BT)}

    def predict(self, ids_BT: Tensor) -> Tensor | float:
        keys = self.keys(ids_BT)
        return sum((means.values[keys[means.name]] for means in self.means), 0.0)

    @torch.no_grad()
    def code(self, values_BTK: Tensor, ids_BT: Tensor, training: bool = True) -> Tensor:
        """Return what the receiver decodes; learn from it and count it in training."""
        options = self.options
        if options.bits is None or self.exact:
            return values_BTK
        if options.bits == 0:  # a control: nothing is sent
            return torch.zeros_like(values_BTK)
        keys = self.keys(ids_BT)
        predicted = self.predict(ids_BT)
        if self.step is None:
            self.step = options.start * float(values_BTK.square().mean().sqrt()) + 1e-30
        step = self.step
        if training and options.rotate:
            self.turn((values_BTK - predicted).flatten(0, 1))
        rotation_KK = self.rotation_KK
        scaled = (values_BTK - predicted) @ rotation_KK / step
        self.slope = 4 * scaled / (1 + 4 * scaled**2) @ rotation_KK.T / (math.log(2) * step)
        if options.sample and training:
            norm_BT1 = scaled.norm(dim=-1, keepdim=True)
            share_BT1 = (norm_BT1 / options.sample).clamp(1e-9, 1)
            scaled = scaled * ((torch.rand(share_BT1.shape, generator=self.generator) < share_BT1) / share_BT1)
        noise = torch.rand(scaled.shape, generator=self.generator) - 0.5 if options.dither and training else 0.0
        shifted = scaled + noise
        codes = shifted.sign() * (shifted.abs() + options.rounding).floor()
        decoded = predicted + step * (codes - noise - options.shrink * codes.sign()) @ rotation_KK.T
        if training:
            self.count(codes, keys)
            self.learn(decoded, codes, keys)
            error = (values_BTK - decoded).square().sum() / values_BTK.square().sum().clamp_min(1e-30)
            innovation = (values_BTK - predicted).square().sum() / values_BTK.square().sum().clamp_min(1e-30)
            self.last["rotation_gain"] = rotation_gain(((values_BTK - predicted) @ rotation_KK).flatten(0, 1), step)
            for name, value in (("mean_error", error), ("mean_innovation", innovation)):
                self.last[name] = 0.98 * self.last.get(name, float(value)) + 0.02 * float(value)
            self.last |= {"error": float(error), "innovation": float(innovation), "step": step, "zeros": float((codes == 0).float().mean())}
        return decoded

    def turn(self, values_NK: Tensor) -> None:
        """Follow the covariance of what is sent; now and then go over to its eigenvectors, largest first."""
        found_KK = values_NK.T @ values_NK / len(values_NK)
        self.covariance_KK = found_KK if self.covariance_KK is None else self.covariance_KK.lerp(found_KK, 0.05)
        self.messages += 1
        if self.messages == 20 or self.messages % int(self.options.rotate) == 0:
            _, vectors_KK = torch.linalg.eigh(self.covariance_KK)
            self.rotation_KK = vectors_KK.flip(1).contiguous()
            self.bits += 16 * self.rank**2

    def expected(self, magnitude: Tensor, keys: dict[str, Tensor]) -> Tensor:
        """Return the expected magnitude of each code from channels before, neighbours and the table of tokens."""
        before = magnitude.cumsum(-1) - magnitude
        size_before_K = self.size_K.cumsum(0) - self.size_K
        zero = torch.zeros_like(before[:, :1])
        near = torch.cat((zero, before[:, :-1]), 1) + torch.cat((before[:, 1:], zero), 1)
        prior = torch.ones(magnitude.shape[:2])
        if self.options.energy in ("token", "both"):
            prior = prior * self.ratio["token"][keys["token"]]
        if self.options.energy in ("target", "both"):
            prior = prior * self.ratio["target"][keys["target"]]
        weight = 1.0 + 0.1 * float(self.size_K.sum())
        ratio = (weight * prior[..., None] + before + 0.2 * near) / (weight + 1.4 * size_before_K)
        return self.size_K * ratio

    def count(self, codes: Tensor, keys: dict[str, Tensor]) -> None:
        """Add the code length, move the step size towards the target, learn the distribution of codes."""
        expected = self.expected(codes.abs(), keys)
        group = (expected.clamp_min(1e-6).log2() * PER_OCTAVE - LOWEST * PER_OCTAVE).round().clamp(0, CLASSES - 1).long()
        table = self.counts_CS + self.prior_CS
        table = table / table.sum(1, keepdim=True)
        clipped = codes.clamp(-LARGEST, LARGEST)
        places = group * (2 * LARGEST + 1) + (clipped + LARGEST).long()
        bits = -table.flatten()[places].log2().sum()
        beyond = (codes.abs() - LARGEST).clamp_min(0)
        bits += ((2 * (beyond + 1).log2().floor() + 1) * (codes.abs() >= LARGEST)).sum()
        total, tokens = float(bits) + HEADER_BITS, codes[..., 0].numel()
        self.bits, self.tokens = self.bits + total, self.tokens + tokens
        self.last["bits"] = total / tokens
        self.last["mean_bits"] = 0.98 * self.last.get("mean_bits", total / tokens) + 0.02 * total / tokens
        wrong = math.log(max(total / tokens, 1e-3) / self.target())
        self.step *= math.exp(self.options.control * max(-2.0, min(2.0, wrong)))
        if self.options.floor:
            excess = math.log(max(self.step / self.options.floor, 1e-9))
            self.step = max(self.step, self.options.floor)
            change = min(0.05, excess) if excess > 0 else max(-0.05, wrong)
            self.penalty = min(1e-2, max(1e-5, self.penalty * math.exp(change)))
            self.last["penalty"] = self.penalty
        found = torch.bincount(places.flatten(), minlength=table.numel()).float().view_as(table)
        self.counts_CS = 0.95 * self.counts_CS + found

    def target(self) -> float:
        """Return the bits per token to aim at now; it rises over a twentieth of the run."""
        options, progress = self.options, self.tokens / 1024 / self.options.messages
        rise = min(1.0, max(0.0, (progress - options.late_from) / 0.05 + 0.5))
        assert options.bits is not None
        base = options.bits / (options.late_from + (1 - options.late_from) * options.late)
        return base * (1 + rise * (options.late - 1))

    def learn(self, decoded: Tensor, codes: Tensor, keys: dict[str, Tensor]) -> None:
        """Update sizes and means from decoded values."""
        magnitude = codes.abs()
        ratio_BT = magnitude.sum(-1) / self.size_K.sum()
        self.size_K = self.size_K.lerp(magnitude.mean((0, 1)), 0.1).clamp_min(1e-3)
        for name, table in self.ratio.items():
            update(table[:, None], keys[name], ratio_BT[..., None], 0.02)
            table.clamp_(0.02, 50)
        left = decoded
        for means in self.means:
            left = means.learn(keys[means.name], left)


class Means:
    """Running means of what is left by those before, by key."""

    def __init__(self, name: str, rank: int, prior: float, rate: float) -> None:
        self.name, self.prior, self.rate = name, prior, rate
        self.values, self.seen = torch.zeros(BUCKETS, rank), torch.zeros(BUCKETS)

    def learn(self, keys_BT: Tensor, values_BTK: Tensor) -> Tensor:
        """Take in decoded values; return what was left of them by the means as they were."""
        left = values_BTK - self.values[keys_BT]
        keys = keys_BT.flatten()
        rows, places, count = keys.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(rows), left.shape[-1]).index_add_(0, places, left.flatten(0, 1))
        seen = self.seen[rows]
        weight = torch.maximum((seen + count + self.prior).clamp_max(1 / self.rate), count)
        self.values[rows] += sums / weight[:, None]
        self.seen[rows] = seen + count
        return left


def update(table_VK: Tensor, keys_BT: Tensor, values_BTK: Tensor, rate: float) -> None:
    """Move the rows of these keys towards the values, as if one by one."""
    keys, count = keys_BT.flatten(), torch.zeros(len(table_VK))
    count.index_add_(0, keys, torch.ones(len(keys)))
    sums = torch.zeros_like(table_VK).index_add_(0, keys, values_BTK.flatten(0, 1))
    rows = count.nonzero()[:, 0]
    weight = 1 - (1 - rate) ** count[rows, None]
    table_VK[rows] += weight * (sums[rows] / count[rows, None] - table_VK[rows])


def rotation_gain(values_NK: Tensor, step: float) -> float:
    """Estimate the bits per token that the best rotation would save, after reverse water filling at the error of this step."""
    covariance_KK = values_NK.T @ values_NK / len(values_NK)
    floor = step**2 / 6

    def rate(variances_K: Tensor) -> float:
        return float(0.5 * (variances_K / floor).clamp_min(1).log2().sum())

    return rate(covariance_KK.diagonal()) - rate(torch.linalg.eigvalsh(covariance_KK))
