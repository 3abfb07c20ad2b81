"""What both ends of a boundary know of the codes that cross it in one direction, and learn alike.

A value is sent as the number of steps between it and what both ends predict for its token and channel:

    sender      y = x U,   q = round((y - mean[t]) / step)          integers, `bits/entropy.py` puts them into bytes
    receiver    x = (mean[t] + q step) U^T

mean is a table of what was received for each token so far, U the rotation to the principal axes of q, step a number on a ladder that the
sender chooses and every payload carries. Predicting inside the quantiser, and not only in the coder, makes the zero of the dead zone
mean `as usual`. Everything is learnt from codes alone, in integers, and only when a step is committed: sums over a step's microbatches
do not depend on their order, an abandoned step leaves nothing behind, and both ends hold the same numbers without a word about them.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.bits import entropy
from thinwire.bits.entropy import LIMIT, UNIT, Ints, Tables
from thinwire.bits.grid import WIDTHS
from thinwire.bits.ladder import HIGHEST, LOWEST, OCTAVE, nearest, ratio, step_size
from thinwire.codecs.rotation import principal
from thinwire.model.ends import Context

CODES = torch.float32
"""Format of codes in the graph: it holds them, and UNIT times them, exactly."""
NOT_FINITE = LIMIT
"""The code of a value that is not finite."""
UNSET = LOWEST - 1
WINDOW = 64
"""Tokens after which the mean of one forgets the first."""
GENERAL_WINDOW = 4096
"""The same for the mean of all, with which that of a new token begins."""
MEAN_LIMIT = 2**30
FINE = 2**16
"""Usual sizes are kept in 1/FINE of the reference step."""
WIDEST = 128
"""Most channels that are rotated: the work grows with their cube."""
ROTATE_EVERY = 32
"""Steps between rotations, after those of steps 1, 2, 4, 8, ..."""
TURN = 2**30
"""One, in the elements of the rotation."""
CARRY = 2**14
"""One, in the rotation of the means: their products add up exactly in fp64."""
FARTHEST = 12 * OCTAVE
"""Largest ratio of steps that means are carried over."""
DRIFT = 4 * OCTAVE
"""How far the step moves until the reference step follows."""
MESSAGE_BITS = 64
"""What a payload takes besides its codes, nearly."""
MOST_CHANGE = OCTAVE // 2
"""How far the step size moves after one step."""
# Step sizes beside the root mean square whose error is that of `quantize` with so many bits: scale of 1/127 and 1/7 of the largest of
# some 32 Gaussian values, and the Lloyd-Max levels' mean square errors of 0.0345, 0.1175 and 0.3634.
STEP_OF_BITS = dict(zip(WIDTHS, (0.019, 0.343, 0.644, 1.187, 2.088), strict=True))


@dataclass(frozen=True)
class Aim:
    """What the step size is steered to: bits per code, or the error of `quantize` with `bits`."""

    rate: float | None
    bits: int | None

    @property
    def usual(self) -> float:
        """Return the bits per code to expect."""
        return self.rate if self.rate is not None else float(self.bits or 0)

    def first(self, spread: float) -> int:
        """Choose the first step for values of that root mean square: at many bits the entropy of a Gaussian, at few a bound."""
        share = STEP_OF_BITS[self.bits] if self.bits is not None else min(2.0, 2 ** (2.05 - self.usual))
        return nearest(spread * share)

    def next(self, number: int, rate: float, spread: float) -> int:
        """Choose the step after one with that rate and root mean square of what was received, in steps."""
        if self.rate is not None:
            wanted = number + round(OCTAVE / 2 * (rate - self.rate))
        else:
            assert self.bits is not None
            wanted = number + nearest(spread * STEP_OF_BITS[self.bits]) if spread > 0 else number - MOST_CHANGE
        return min(max(wanted, number - MOST_CHANGE, LOWEST), number + MOST_CHANGE, HIGHEST)


@dataclass(frozen=True)
class Coding:
    """What packing needs of a model: made once after each step."""

    sizes: Ints
    unit: int | None
    """What step the sizes count; None: nothing was learnt, and they count whichever is in use."""
    tables: Tables
    check: int
    """Part of a hash of all that was learnt."""

    def at(self, number: int) -> Ints:
        """Return the usual sizes of codes in steps of another size, in 1/UNIT."""
        sizes = self.sizes if self.unit is None else carried(self.sizes, self.unit - number)
        return np.maximum(sizes // (FINE // UNIT), 1)


@dataclass
class Seen:
    """The codes of a step under way."""

    step: int = -1
    number: int = UNSET
    ids: list[Tensor] = field(default_factory=list)
    codes: list[Tensor] = field(default_factory=list)


def carried(values: Ints, difference: int) -> Ints:
    """Return integers times 2^(difference/32), rounded."""
    factor, shift = ratio(min(max(difference, -FARTHEST), FARTHEST))
    return (values * factor + (1 << (shift - 1))) >> shift


class CodeModel(nn.Module):
    """Quantise, dequantise and learn at one end."""

    number: Tensor
    unit: Tensor
    age: Tensor
    means_VK: Tensor
    counts_V: Tensor
    sizes_K: Tensor
    moments_KK: Tensor
    rotation_KK: Tensor
    tables: Tensor

    def __init__(self, width: int, vocabulary: int, aim: Aim, dead_zone: float, compute: torch.dtype) -> None:
        """Begin with nothing learnt; without a vocabulary nothing is predicted."""
        super().__init__()
        self.width, self.vocabulary, self.aim, self.dead_zone, self.compute = width, vocabulary, aim, dead_zone, compute
        self.rotates = 1 < width <= WIDEST
        self.register_buffer("number", torch.tensor(UNSET))
        # Means and usual sizes count steps of this number.
        self.register_buffer("unit", torch.tensor(0))
        self.register_buffer("age", torch.tensor(0))
        # The last row is the mean of all tokens.
        self.register_buffer("means_VK", torch.zeros(vocabulary + 1 if vocabulary else 0, width, dtype=torch.int32))
        self.register_buffer("counts_V", torch.zeros(len(self.means_VK), dtype=torch.int32))
        self.register_buffer("sizes_K", torch.full((width,), FINE))
        turned = width if self.rotates else 0
        self.register_buffer("moments_KK", torch.zeros(turned, turned, dtype=torch.int64))
        self.register_buffer("rotation_KK", torch.eye(turned, dtype=torch.int32) * TURN)
        self.register_buffer("tables", torch.from_numpy(entropy.prior_counts().copy()))
        self.seen, self.rate = Seen(), math.nan
        self._coding: Coding | None = None
        self.register_load_state_dict_post_hook(lambda module, keys: module.forget())

    def forget(self) -> None:
        """Drop what was made from the state: it has changed."""
        self._coding, self.seen = None, Seen()

    def coding(self) -> Coding:
        """Return what packing needs."""
        if self._coding is None:
            check = 0
            for name, buffer in self.named_buffers():
                if name != "number" and buffer.numel():  # the sender's choice, in every payload
                    check = zlib.crc32(buffer.cpu().contiguous().view(-1).view(torch.uint8).numpy().data, check)
            sizes, counts = self.sizes_K.cpu().numpy(), self.tables.cpu().numpy()
            self._coding = Coding(sizes, int(self.unit) if int(self.age) else None, Tables.of(counts), check & 0xFF)
        return self._coding

    def quantize(self, values_BTK: Tensor, ids_BT: Tensor, context: Context, noise: Tensor | None = None) -> Tensor:
        """Return the step's number and the codes in one row; with noise in [0, 1) round stochastically, else with a dead zone."""
        turned = self._turned(values_BTK.detach().to(self.compute), back=False)
        number = int(self.number)
        if number == UNSET:
            number = self.aim.first(float(turned[turned.isfinite()].double().square().mean().sqrt().nan_to_num(0.0)))
            if context.training:
                self.number.fill_(number)
        steps = turned / step_size(number)
        if self.vocabulary:
            steps -= self._predicted(ids_BT, number).to(steps.dtype) / UNIT
        codes = (steps.abs() + (1 - self.dead_zone)).floor().copysign(steps) if noise is None else (steps + noise).floor()
        codes = codes.clamp(1 - LIMIT, LIMIT - 1).where(steps.isfinite(), NOT_FINITE).to(CODES)
        self._see(codes, ids_BT, number, context)
        return torch.cat((codes.new_tensor([number]), codes.flatten() + 0.0))

    def dequantize(self, row: Tensor, ids_BT: Tensor, context: Context) -> Tensor:
        """Return the values that a row from `quantize` stands for."""
        number, codes = int(row[0]), row[1:].detach().view(*ids_BT.shape, self.width)
        fine = codes.to(self.compute) * UNIT
        if self.vocabulary:
            fine += self._predicted(ids_BT, number).to(self.compute)
        values = (fine * (step_size(number) / UNIT)).masked_fill(codes == NOT_FINITE, torch.nan)
        self._see(codes, ids_BT, number, context)
        return self._turned(values, back=True)

    def _turned(self, values: Tensor, *, back: bool) -> Tensor:
        """Go over to the principal axes, or back."""
        if not self.rotates or not int(self.age):
            return values
        rotation_KK = (self.rotation_KK.to(torch.float64) / TURN).to(values.dtype)
        with torch.autocast(values.device.type, enabled=False):
            return values @ (rotation_KK.T if back else rotation_KK)

    def _predicted(self, ids: Tensor, number: int) -> Tensor:
        """Return what is expected of tokens, in 1/UNIT of a step."""
        rows = torch.where(self.counts_V[ids] > 0, ids, self.vocabulary)
        factor, shift = ratio(min(max(int(self.unit) - number, -FARTHEST), FARTHEST))
        return ((self.means_VK[rows].long() * factor + (1 << (shift - 1))) >> shift).clamp_(-(2**22), 2**22)

    def _see(self, codes: Tensor, ids_BT: Tensor, number: int, context: Context) -> None:
        """Keep a training microbatch's codes until the step is committed."""
        if not context.training:
            return
        if context.step != self.seen.step:
            self.seen = Seen(context.step, number)
        self.seen.ids.append(ids_BT.flatten().cpu())
        self.seen.codes.append(codes.to(torch.int16).flatten(0, 1).cpu())

    def commit(self) -> None:
        """Learn from the codes of a step, of which both ends have the same."""
        seen, self.seen = self.seen, Seen()
        if not seen.codes:
            return
        ids, codes = torch.cat(seen.ids), torch.cat(seen.codes).long()
        codes = codes.masked_fill(codes == NOT_FINITE, 0)
        messages, number, codes_NK = len(seen.codes), seen.number, codes.numpy()
        coding = self.coding()
        found = entropy.count_symbols(codes_NK, coding.at(number))
        self.rate = (float((found * coding.tables.lengths()).sum()) + MESSAGE_BITS * messages) / codes_NK.size
        self._follow(number)
        fine = codes * UNIT
        if self.vocabulary:
            fine = fine + self._predicted(ids.to(self.unit.device), number).cpu()
            self._learn_means(ids, torch.from_numpy(carried(fine.numpy(), number - int(self.unit))))
        self._learn_sizes(codes_NK, number)
        self.tables.copy_(torch.from_numpy(entropy.learn(self.tables.cpu().numpy(), found)))
        self.age += 1
        if self.rotates:
            self._learn_rotation(codes_NK)
        spread = math.sqrt(float(fine.double().square().mean())) / UNIT
        self.number.fill_(self.aim.next(number, self.rate, spread))
        self._coding = None

    def _follow(self, number: int) -> None:
        """Let the reference step follow one that has moved away."""
        unit = int(self.unit)
        if not int(self.age) or abs(number - unit) > DRIFT:
            for buffer in (self.means_VK, self.sizes_K) if int(self.age) else ():
                moved = carried(buffer.cpu().numpy().astype(np.int64), unit - number)
                buffer.copy_(torch.from_numpy(moved.clip(-MEAN_LIMIT, MEAN_LIMIT)))
            self.unit.fill_(number)

    def _learn_means(self, ids: Tensor, values_NK: Tensor) -> None:
        """Move the means of the tokens that have come towards what came."""
        tokens, places, occurrences = ids.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(tokens), self.width, dtype=torch.int64).index_add_(0, places, values_NK)
        means, counts = self.means_VK.cpu().long(), self.counts_V.cpu().long()
        last, known = self.vocabulary, counts[tokens].unsqueeze(1)
        base = torch.where(known > 0, means[tokens], means[last])
        weight, added = known.clamp_min(1), occurrences.unsqueeze(1)
        whole = torch.cat((tokens, torch.tensor([last])))
        base = torch.cat((base, means[last:]))
        sums = torch.cat((sums, values_NK.sum(0, keepdim=True)))
        weight = torch.cat((weight, counts[last:].unsqueeze(1)))
        added = torch.cat((added, torch.tensor([[len(ids)]])))
        moved = torch.div(base * weight + sums, weight + added, rounding_mode="floor")
        limits = torch.full_like(weight, WINDOW)
        limits[-1] = GENERAL_WINDOW
        device = self.means_VK.device
        self.means_VK[whole.to(device)] = moved.clamp(-MEAN_LIMIT, MEAN_LIMIT).int().to(device)
        self.counts_V[whole.to(device)] = (weight + added).minimum(limits).squeeze(1).int().to(device)

    def _learn_sizes(self, codes_NK: Ints, number: int) -> None:
        """Move the usual size of each channel's codes a quarter of the way to that of this step."""
        found = carried(np.abs(codes_NK).sum(0) * FINE // len(codes_NK), number - int(self.unit))
        before = self.sizes_K.cpu().numpy() if int(self.age) else found
        self.sizes_K.copy_(torch.from_numpy(np.maximum((3 * before + found) // 4, 1)))

    def _learn_rotation(self, codes_NK: Ints) -> None:
        """Add to the second moments of the codes and, now and then, turn to their principal axes."""
        bounded = codes_NK.clip(-1023, 1023).astype(np.float64)  # so that all sums are exact, whatever their order
        self.moments_KK += torch.from_numpy((bounded.T @ bounded).astype(np.int64)).to(self.moments_KK.device)
        age = int(self.age)
        if age & (age - 1) and age % ROTATE_EVERY:
            return
        moments_KK = self.moments_KK.cpu().numpy().astype(np.float64)
        variances, axes = principal(moments_KK)
        self.moments_KK.zero_()
        self.rotation_KK.copy_(torch.from_numpy(product(self.rotation_KK.cpu().numpy() / TURN, axes)))
        turn = np.rint(axes * CARRY)
        moved = np.rint(self.means_VK.cpu().numpy().astype(np.float64) @ turn / CARRY)
        self.means_VK.copy_(torch.from_numpy(moved.clip(-MEAN_LIMIT, MEAN_LIMIT).astype(np.int32)))
        self._turn_sizes(moments_KK, variances)

    def _turn_sizes(self, moments_KK: np.ndarray, variances: np.ndarray) -> None:
        """Expect of each new axis the size of codes that its variance tells, as many in all as before."""
        total = max(float(np.trace(moments_KK)), 1.0)
        share = np.sqrt(variances / total)
        sizes = self.sizes_K.cpu().numpy()
        scaled = np.rint(share * (int(sizes.sum()) / max(add(share), 1e-9)))
        self.sizes_K.copy_(torch.from_numpy(np.maximum(scaled, 1).astype(np.int64)))


def add(values: np.ndarray) -> float:
    """Add up numbers one after the other, in the same order on every machine."""
    return float(np.add.accumulate(values)[-1])


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Multiply two matrices in an order that no library chooses; return fixed-point numbers."""
    total = np.zeros_like(left)
    for column in range(len(right)):
        total = total + left[:, column : column + 1] * right[column]
    return np.rint(total * TURN).clip(-TURN, TURN).astype(np.int32)
